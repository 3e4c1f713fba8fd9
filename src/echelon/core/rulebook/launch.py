# SPDX-License-Identifier: Apache-2.0
"""Rules about starting ranks, and about the machine on which ranks run."""

from echelon.core.rules import Area, Rule

TARGET_NOT_FOUND = Rule(
    id="target-not-found",
    why="""
    Ranks are other processes: what they run is named as package.module:function and imported
    there. A lambda, a nested function or a function of the main script has no such name.
    """,
    bad='run_ranks("my_module.train", ...)',
    fixed='run_ranks("my_module:train", ...)',
)

PORT_IN_USE = Rule(
    id="port-in-use",
    why="""
    The ranks of a run find one another through one port of the first rank. Two runs on one
    machine cannot share it; without MASTER_PORT, Echelon takes a free one.
    """,
    bad="MASTER_PORT=29500 echelon train run.toml      # while another run holds 29500",
    fixed="echelon train run.toml",
)

RANK_ENVIRONMENT = Rule(
    id="rank-environment",
    why="""
    A launcher tells each process its rank: torchrun in RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT, others in variables of their own (SLURM_PROCID, OMPI_COMM_WORLD_RANK,
    PALS_RANKID, PMI_RANK, JOB_COMPLETION_INDEX), which are read where those of torchrun are not
    set. With some of them missing, or one that is no number or out of range, nobody knows which
    rank this is. `echelon doctor` shows what is read.
    """,
    bad="RANK=0 WORLD_SIZE=2 echelon train run.toml",
    fixed="torchrun --nproc-per-node 2 -m echelon train run.toml",
)

LAUNCHERS_AGREE = Rule(
    id="launchers-agree",
    why="""
    A process has one rank. Variables of several launchers may be set, as where a script exports
    WORLD_SIZE and srun sets SLURM_NTASKS. Where one of them says only half, the rank or the number
    of ranks, the other completes it, and both must agree. A whole launch inside of another launch,
    such as torchrun as a task of srun, counts alone.
    """,
    bad="WORLD_SIZE=8 srun --ntasks 4 echelon train run.toml",
    fixed="srun --ntasks 4 echelon train run.toml",
)

TF_CONFIG_FORM = Rule(
    id="tf-config-form",
    why="""
    TF_CONFIG is JSON with two tables: "cluster" lists HOST:PORT addresses by role (chief, worker,
    ps), "task" says which of them this process is. The chief, or worker 0 without one, is rank 0;
    the others follow in their order, and all of them meet at its address. Each process has the same
    cluster and a task of its own.
    """,
    bad="""TF_CONFIG='{"cluster": {"worker": ["h0", "h1"]}, "task": {"type": "worker"}}'""",
    fixed="""
    TF_CONFIG='{"cluster": {"worker": ["h0:2222", "h1:2222"]},
                "task": {"type": "worker", "index": 1}}'
    """,
)

TF_CONFIG_ROLE = Rule(
    id="tf-config-role",
    why="""
    The chief, workers and parameter servers (ps) are ranks. An evaluator is none: it watches the
    checkpoints of a run beside them, which `echelon train` does in its process. Whatever else ranks
    do together, it has no part in.
    """,
    bad="""
    TF_CONFIG='{"cluster": {"worker": ["h0:2222", "h1:2222"]},
                "task": {"type": "evaluator", "index": 0}}' echelon generate runs/nano
    """,
    fixed="""
    TF_CONFIG='{"cluster": {"worker": ["h0:2222", "h1:2222"]},
                "task": {"type": "evaluator", "index": 0}}' echelon train run.toml
    """,
)

TF_CONFIG_SERVERS = Rule(
    id="tf-config-servers",
    why="""
    Tasks of the role ps are parameter servers: ranks after those of the chief and the workers. The
    plan says how many there are, as it says how many ranks its mesh has: servers.count is the
    number of ps tasks, and the degrees of the mesh multiply to that of the others.
    """,
    bad="""
    TF_CONFIG='{"cluster": {"worker": ["h0:2222", "h1:2222"], "ps": ["h2:2222"]}, ...}' \\
        echelon train run.toml --set mesh.dp_replicate=2
    """,
    fixed="""
    TF_CONFIG='{"cluster": {"worker": ["h0:2222", "h1:2222"], "ps": ["h2:2222"]}, ...}' \\
        echelon train run.toml --set mesh.dp_replicate=2 --set servers.count=1
    """,
)

TF_CONFIG_AGREES = Rule(
    id="tf-config-agrees",
    why="""
    A process has one place. Where a launcher has set RANK, WORLD_SIZE and the like as well as
    TF_CONFIG, both must say the same rank of as many: else half of the ranks would follow the one
    and half the other, and wait for ever. Variables of no launch are best left unset.
    """,
    bad="""RANK=1 WORLD_SIZE=4 TF_CONFIG='{"cluster": {"worker": ["h0:1", "h1:1"]}, ...}' ...""",
    fixed="""env -u TF_CONFIG torchrun --nproc-per-node 4 -m echelon train run.toml""",
)

LAUNCHED_WORLD_SIZE = Rule(
    id="launched-world-size",
    why="""
    The world size is the product of the degrees of the mesh. torchrun decides how many
    processes there are before Echelon sees the run file, so the two must agree.
    """,
    bad="torchrun --nproc-per-node 4 -m echelon train run.toml      # a mesh of 8 ranks",
    fixed="torchrun --nproc-per-node 8 -m echelon train run.toml",
)

RANK_NEVER_JOINED = Rule(
    id="rank-never-joined",
    why="""
    A run begins when every rank has joined. One that does not (its host is down, it cannot
    reach MASTER_ADDR, or its imports hang) would leave the others waiting for ever.
    """,
    bad="torchrun --nnodes 2 ...      # on one of the two hosts only",
    fixed="torchrun --nnodes 2 ...      # on both hosts, each reaching MASTER_ADDR:MASTER_PORT",
)

ENOUGH_DEVICES = Rule(
    id="enough-devices",
    why="""
    With the nccl backend each rank of a host drives one GPU of its own. The cluster of the
    run file promises more than this host has, or the installed torch cannot see them.
    """,
    bad="eight ranks on a host where torch sees two GPUs",
    fixed='[cluster] preset = "laptop"      # CPU ranks over gloo',
)

FLASH_3_INSTALLED = Rule(
    id="flash-3-installed",
    why="""
    `context.attention = "flash-3"` asks for FlashAttention-3. It runs on Hopper GPUs where its
    package, flash_attn_interface, is installed, and PyTorch (2.12 or later) knows how to call it.
    """,
    bad='[context] attention = "flash-3"  # without the package, or on another GPU',
    fixed='[context] attention = "auto"     # FlashAttention-3 where it is there, else -2',
)

RANK_RAISED = Rule(
    id="rank-raised",
    why="""
    A rank raised an exception, so the run ended: the others cannot go on without it. What is
    shown is the first rank that failed; what the others saw afterwards is in their logs.
    """,
    bad="an error in the code or the data of one rank",
    fixed="read the traceback below the rank's name, and logs/rank-NNNN.log",
)

RANK_KILLED = Rule(
    id="rank-killed",
    why="""
    A process of the run ended by a signal or without a word: kill -9, the kernel when memory
    is short (SIGKILL), or a crash in native code (SIGSEGV, SIGABRT). The others were ended.
    """,
    bad="kill -9 of one rank, or more memory asked for than the machine has",
    fixed="echelon train run.toml --resume runs/first     # see dmesg for 'Out of memory'",
)

RANK_STOPPED = Rule(
    id="rank-stopped",
    why="""
    A process of the run is stopped (SIGSTOP, a debugger, a frozen container) or has not said
    for long that it is alive. The others would wait for it for ever, so the run ended.
    """,
    bad="kill -STOP of one rank",
    fixed="echelon train run.toml --resume runs/first",
)

RANK_STUCK = Rule(
    id="rank-stuck",
    why="""
    A rank is alive, but its main thread has not moved for longer than the step timeout while
    others wait for it. Its stack is shown. If a step may take that long, raise the timeout.
    """,
    bad="a data file on a network disk that does not answer",
    fixed="--set train.step_timeout_s=1800      # where steps are really that slow",
)

COLLECTIVES_MEET = Rule(
    id="collectives-meet",
    why="""
    A collective ends when every rank of its group has called it; the ranks of a group call the same
    ones in the same order, with tensors of the same size. One that skips a call, or makes another
    one first, leaves the others waiting for ever, or gives them bytes that were meant for another
    tensor. A send has its receive in the same way. Each rank leaves a fingerprint of every call;
    a wait of train.desync_after_s makes them compared, and the call and the line of the odd rank
    and of the others are told. Who is odd is said by most: in a group of two by other groups that
    made the same calls, and where there is none both are named.
    """,
    bad="if rank == 0: dist.all_reduce(gradient)",
    fixed="dist.all_reduce(gradient)                   # on every rank of the group",
)

LINK_CARRIES = Rule(
    id="link-carries",
    why="""
    All members of a group have called the same operation, and nothing arrives: the link between
    them is cut, or so slow that a message takes longer than the time limit. The ranks whose
    messages are missing are named. Nobody's program is at fault.
    """,
    bad="a network cable that is pulled out, or a firewall between two hosts",
    fixed="ping the host of the rank that is named, and start again with --resume",
)

JOB_TIMED_OUT = Rule(
    id="job-timed-out",
    why="Every rank was still moving, but the job as a whole took longer than it was given.",
    bad="a proof of a large model with a time limit for a small one",
    fixed="a longer time limit, or a smaller model",
)

RUN_INTERRUPTED = Rule(
    id="run-interrupted",
    why="""
    Ranks that torchrun started and that write weights stop at the next tensor when they are
    asked to by SIGINT or SIGTERM. Nothing of the folder is left.
    """,
    bad="torchrun --nproc-per-node 2 -m echelon export weights runs/nano, then Ctrl-C",
    fixed="the same command again, to its end",
)

LAUNCHER_LOST = Rule(
    id="launcher-lost",
    why="""
    Local ranks are forked by one process that has imported torch for all of them. It ended
    or could not start, and the ranks ended with it.
    """,
    bad="kill -9 of echelon.launch.local.fork_server, or an environment without torch",
    fixed="pip install 'echelon-parallel[train]'",
)

SAME_CODE = Rule(
    id="same-code",
    why="""
    All ranks must run the same Echelon: hosts with different checkouts would train different
    models without an error. The version and a hash of the source are compared at start.
    """,
    bad="two hosts, one not updated",
    fixed="the same version, installed on every host",
)

SAME_TORCH = Rule(
    id="same-torch",
    why="All ranks must run the same torch: kernels and collectives differ between versions.",
    bad="torch 2.13.0 on one host, 2.12.1 on another",
    fixed="pip install torch==2.13.0     # on every host",
)

SAME_CONFIG = Rule(
    id="same-config",
    why="""
    All ranks must run the same plan. A run file edited on one host, or another environment
    variable there, gives ranks that do not fit together.
    """,
    bad="run.toml differs between two hosts",
    fixed="one run.toml on a shared disk, or copies that are equal",
)

SAME_STATE = Rule(
    id="same-state",
    why="""
    Ranks that hold the same tensors must hold the same values at the start: the initial
    weights of replicas are compared by digest.
    """,
    bad="one rank loaded another checkpoint",
    fixed="the same seed and the same checkpoint on every rank",
)


MACHINE_AREA = Area("machine")
"""The machine: what a run needs of it. `echelon doctor` checks all of them."""

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
