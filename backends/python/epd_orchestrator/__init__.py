"""The threads around the core: intake, one runner a worker instance, the dispatcher of answers. Knows no Triton."""
