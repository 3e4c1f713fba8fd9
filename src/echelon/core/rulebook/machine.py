# SPDX-License-Identifier: Apache-2.0
"""Rules about the machine: what a run needs of it. `echelon doctor` checks all of them."""

from echelon.core.rules import Rule

PYTHON_VERSION = Rule(
    id="python-version",
    why="Echelon reads TOML with the standard library and uses `StrEnum`: Python 3.11 or later.",
    bad="python3.10 -m pip install echelon-parallel",
    fixed="python3.11 -m venv .venv\n.venv/bin/python -m pip install echelon-parallel",
)

TORCH_INSTALLED = Rule(
    id="torch-installed",
    why="""
    Planning needs no torch; proving and training do. It is an extra, so that a plan can be made on
    a machine that will never train.
    """,
    bad="pip install echelon-parallel     # without its extra",
    fixed="pip install 'echelon-parallel[train]'",
)

TORCH_VERSION = Rule(
    id="torch-version",
    why="""
    Echelon is tested with the newest torch of its release and supports 2.11 and later: earlier
    versions lack collectives and options that it uses.
    """,
    bad="pip install torch==2.4",
    fixed="pip install --upgrade 'echelon-parallel[train]' 'torch>=2.11'",
)

BACKEND_AVAILABLE = Rule(
    id="backend-available",
    why="""
    Ranks on CPUs talk over Gloo, ranks on NVIDIA GPUs over NCCL. A build of torch without the
    backend that the devices need cannot start a process group.
    """,
    bad="a torch built with USE_DISTRIBUTED=0",
    fixed="the torch from PyPI, which has Gloo, and NCCL in its CUDA builds",
)

SYMMETRIC_MEMORY = Rule(
    id="symmetric-memory-available",
    why="""
    mesh.tp_overlap = "symmetric-memory" calls symm_mem::fused_all_gather_matmul and
    symm_mem::fused_matmul_reduce_scatter of PyTorch, whose kernels are those of CUDA, on GPUs that
    can read one another's memory. Each rank looks before it builds its part of the model.
    """,
    example="""
    [mesh]
    tp = 2
    sequence_parallel = true
    %s
    """,
    bad='tp_overlap = "symmetric-memory"     # GPUs without peer access',
    fixed='tp_overlap = "ring"',
)

ENOUGH_MEMORY = Rule(
    id="enough-memory",
    why="""
    Every rank is a process with its own weights, and torch comes on top. Where ranks take more
    memory than a host has free, the system ends one of them, or another program, without a
    message. So the planned peak of every rank of a host is compared with the free memory of the
    host before a rank starts; where a control group (a container, a batch job) has less, with that.
    Memory of a CPU rank is memory of its host. The peak on a GPU is compared with the free memory
    of that GPU.

    Free memory is a reading of one moment, and a plan says nothing of other programs.
    `--allow-overcommit`, or `ec.train(..., allow_overcommit=True)`, starts the ranks all the same.
    """,
    bad="echelon train llama3-8b --set data.source=corpus.txt     # 195 GiB, on a laptop",
    fixed="echelon train nano --set data.source=corpus.txt",
)

SHARED_MEMORY = Rule(
    id="shared-memory",
    why="""
    NCCL moves data between the GPUs of one machine through /dev/shm. Containers often get 64 MiB of
    it, and then a rank dies with a bus error in its first collective.
    """,
    bad="docker run --gpus all IMAGE",
    fixed="docker run --gpus all --shm-size=8g IMAGE",
)

PORT_AVAILABLE = Rule(
    id="port-available",
    why="""
    The ranks of a run find each other at a TCP port of the machine with rank 0, and talk over more
    of them. A sandbox that forbids listening, even on the loopback address, forbids runs.
    """,
    bad="a sandbox without network namespaces or a loopback device",
    fixed="ip link set lo up",
)

DISK_SPACE = Rule(
    id="disk-space",
    why="""
    Checkpoints are written beside the ones before them and only then are old ones removed, so a run
    needs room for one more than it keeps. The folder must be writable.
    """,
    bad="echelon train run.toml     # in a full or read-only folder",
    fixed="echelon train run.toml --set train.runs_dir=DIR     # DIR has room",
)

GLOO_INTERFACE = Rule(
    id="gloo-interface",
    why="""
    Gloo listens at the address that the host's own name resolves to. Where the name does not
    resolve to an address of this machine, ranks wait for each other until they time out. The
    variable GLOO_SOCKET_IFNAME names the interface to use instead.
    """,
    bad="a host whose name is missing from /etc/hosts",
    fixed="GLOO_SOCKET_IFNAME=lo echelon train run.toml     # all ranks on this machine",
)
