#!/bin/sh
# All that needs one CUDA GPU, without network: bench/gpu/run.sh [--help]
# Python is $PYTHON, else Echelon's own environment where there is one, else python3. It needs
# torch >= 2.11, numpy, psutil, safetensors; what is missing of pytest, pytest-timeout, hypothesis and
# transformers is named and skipped.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
"$python" - <<'PY' || exit 3
import sys

try:
    import torch
except ImportError:
    sys.exit("error: torch is not installed for this Python; name another: PYTHON=... bench/gpu/run.sh")
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 11):
    sys.exit(f"error: torch {torch.__version__} is older than 2.11")
PY
cd "$root"
export PYTHONPATH="$root:$root/src${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$python" -m bench.gpu.run "$@"
