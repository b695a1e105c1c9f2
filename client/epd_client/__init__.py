"""Client library, server launcher and command line. Needs neither torch nor transformers."""
