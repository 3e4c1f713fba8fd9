#!/bin/sh
# Install the peers into an environment of their own: bench/setup_peers.sh [FOLDER=.peers]
# torch comes first and pinned, so that no peer can bring another (or a CUDA) build of it.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
home=${1:-$here/../.peers}
mkdir -p "$home"
home=$(cd "$home" && pwd)
pip="$home/venv/bin/python -m pip --disable-pip-version-check install --quiet ${PIP_FLAGS:-} -c $here/peers.txt"

echo '*' > "$home/.gitignore"
[ -x "$home/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/venv"

echo "installing torch into $home/venv ..."
$pip torch numpy setuptools wheel ninja psutil
# What echelon itself imports: `prove --subject` runs programs of the peers in this environment.
$pip "cyclopts>=5.0,<6" nvidia-ml-py pyyaml rich safetensors
echo "installing transformers, accelerate, deepspeed, megatron-core, torchtitan ..."
$pip transformers accelerate
DS_BUILD_OPS=0 $pip --no-build-isolation deepspeed
$pip megatron-core torchtitan
# torchtitan imports triton, which the CPU build of torch must not find: it lives beside the venv.
[ -d "$home/triton/triton" ] || $pip --no-deps --target "$home/triton" triton

# DeepSpeed compiles C++ at first use. Two ranks doing so under a timeout leave a stale lock, on
# which every later run hangs: one process does it here, into this environment's own folder.
echo "building DeepSpeed's C++ operators ..."
rm -f "$home"/torch_extensions/*/lock
DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$home/torch_extensions" PATH="$home/venv/bin:$PATH" "$home/venv/bin/python" - <<'PY'
from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
    print(name, "is ready")
PY
echo "done: python -m bench.train --peers-home $home"
