#!/usr/bin/env bash
# Run tests/gpu on a host with a CUDA build of PyTorch and without a package index.
#   tests/gpu/run.sh WHEELS [PYTHON]
# WHEELS is a directory with wheels of what the host lacks; they are installed for this run only.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels=${1:?usage: tests/gpu/run.sh WHEELS [PYTHON]}
python=${2:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU: install a CUDA build"'
export PYTHONPATH="$site:scheduler:backends/python:client"
"$python" -m pytest -p no:cacheprovider -rs tests/gpu
