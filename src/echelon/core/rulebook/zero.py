# SPDX-License-Identifier: Apache-2.0
"""Rules about ZeRO, and about the places where slices rest."""

from echelon.core.rules import Area, Rule

ZERO_SHARES_OUT = Rule(
    id="zero-shares-out",
    why="""
    From stage 1 on, ZeRO cuts the optimizer state (2: the gradients, 3: the parameters) into one
    slice for each rank of dp_shard x cp. Over one rank nothing is cut, and a stage has a use only
    where what it cuts is offloaded. Ranks along dp_replicate hold copies: with dp_shard beside them
    this is hybrid sharding, and what crosses between replicas are slices only.
    """,
    example="""
    [mesh]
    %s
    [zero]
    stage = 3
    """,
    bad="dp_replicate = 4",
    fixed="dp_shard = 4                # or dp_replicate = 2 and dp_shard = 2: hybrid sharding",
)

SLICES_NEED_STAGE = Rule(
    id="slices-need-stage",
    why="""
    At stage 0 every rank updates all parameters, so it needs whole gradients. They can add up as
    slices, reduced after every microbatch, where a rank updates its slice only: from stage 1 on.
    """,
    bad="""
    [mesh]
    dp_replicate = 2
    [zero]
    accumulate = "slices"
    """,
    fixed="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 1
    accumulate = "slices"
    """,
)

OFFLOAD_NEEDS_STAGE = Rule(
    id="offload-needs-stage",
    why="""
    What rests in the memory of the host or in files are slices: those of the optimizer from stage 1
    on (ZeRO-Offload), those of the parameters at stage 3 (ZeRO-Infinity). Below these stages a rank
    uses the whole, and nothing can be away between uses. One rank alone may offload, too.
    """,
    bad="""
    [mesh]
    dp_replicate = 2
    [zero]
    optimizer_offload = "host"
    """,
    fixed="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 1
    optimizer_offload = "host"
    """,
)

SECONDARY_NEEDS_NODES = Rule(
    id="secondary-needs-nodes",
    why="""
    Secondary slices keep the gathers of a step after the first inside of nodes (hpZ of ZeRO++). So
    the ranks that share out parameters must be on several nodes, with as many of them on each, and
    more than one: inside of one node all gathers are there already, and a rank that is alone on its
    node would keep all that it has gathered.
    """,
    bad="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_shard = 8                # one node
    [zero]
    stage = 3
    secondary = true
    """,
    fixed="""
    [cluster]
    preset = "16xh100"
    [mesh]
    dp_shard = 16               # two nodes of eight
    [zero]
    stage = 3
    secondary = true
    [batch]
    microbatch_sequences = 1
    """,
)

INT8_BLOCK_DIVIDES = Rule(
    id="int8-block-divides",
    why="""
    With zero.gather = "int8", zero.int8_block neighbours of a row of a matrix share a scale. One
    that lay on two tensor ranks, or were cut short, would be another block under another layout,
    and numbers would be rounded otherwise. So the rows of every matrix on a rank are whole blocks:
    hidden, heads x head_dim / tp, ffn / tp; of experts ffn / expert_tp; of latent attention the
    widths that heads come out of, too.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 3
    gather = "int8"
    %s
    """,
    bad="int8_block = 128            # ffn = 352 is no multiple of it",
    fixed="int8_block = 32",
)

INT8_GATHER_OF_ALL = Rule(
    id="int8-gather-of-all",
    why="""
    With zero.gather = "int8", forward and backward take matrices as they come out of a gather:
    rounded. A matrix that is never gathered would not be rounded, and which these are depends on
    the layout: at stages 0 to 2 all of them, below zero.keep_whole_below the small ones, and under
    sequence parallelism those that lead down to the vectors of latent attention.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    %s
    gather = "int8"
    int8_block = 32
    """,
    bad="stage = 2",
    fixed="stage = 3",
)

INT8_GATHER_ROUNDS_ONCE = Rule(
    id="int8-gather-rounds-once",
    why="""
    Weights that are multiplied as floats of 8 bits can be gathered as just these floats
    (zero.gather = "fp8"): that takes a byte of a number, too, and nothing is rounded twice.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 3
    %s
    [precision]
    matmul = "fp8"
    fp8_block = 32
    """,
    bad="""
    gather = "int8"
    int8_block = 32
    """,
    fixed='gather = "fp8"',
)

REDUCE_NEEDS_NODES = Rule(
    id="reduce-needs-nodes",
    why="""
    With zero.reduce, gradients are rounded to integers and summed in two hops: over the ranks of a
    node, then over the nodes (qgZ of ZeRO++). So gradients must be summed into slices, from stage 1
    on, and the ranks that share out must be on several nodes, with as many of them on each, and
    more than one: inside of one node there is bandwidth for exact sums.
    """,
    bad="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_shard = 8                # one node
    [zero]
    stage = 2
    reduce = "int8"
    """,
    fixed="""
    [cluster]
    preset = "16xh100"
    [mesh]
    dp_shard = 16               # two nodes of eight
    [zero]
    stage = 2
    reduce = "int8"
    [batch]
    microbatch_sequences = 1
    """,
)

NVME_NEEDS_FOLDER = Rule(
    id="nvme-needs-folder",
    why="""
    With "nvme", slices rest in files, and only you know which folder is on a fast disk of every
    node. A folder for temporary files is often memory. The files vanish with the run.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 3
    %s
    """,
    bad='parameter_offload = "nvme"',
    fixed="""
    parameter_offload = "nvme"
    offload_dir = "offloaded"   # a folder that is there, on a fast disk
    """,
)


OFFLOAD_AREA = Area("offload")
"""Where slices rest when they are not on the device: host memory, files."""

OFFLOAD_FOLDER_EXISTS = Rule(
    id="offload-folder-exists",
    why="""
    Slices that rest in files lie in the folder zero.offload_dir, on each machine its own. It is not
    made: a path that is mistyped or not mounted would quietly be a folder on the system disk.
    """,
    bad='zero.offload_dir = "/mnt/nvme0/offload"     # nothing is mounted there',
    fixed="mkdir -p /mnt/nvme0/offload     # on every machine, once the disk is mounted",
)

OFFLOAD_FOLDER_WRITABLE = Rule(
    id="offload-folder-writable",
    why="""
    Every rank keeps one file in zero.offload_dir, so the user who trains must be able to write
    there. The file has no name: however a rank ends, the system frees its space.
    """,
    bad='zero.offload_dir = "/usr/share"',
    fixed='zero.offload_dir = "/mnt/nvme0/offload"     # a folder that this user may write',
)

OFFLOAD_SPACE = Rule(
    id="offload-space",
    why="""
    The space of all slices is reserved before the first step, so that a disk (or a quota, or a
    limit on the size of files) that is too small is found before a run has work to lose. Some
    file systems cannot reserve; there, the first write that finds no room ends the run, which
    then goes on from its last checkpoint.
    """,
    bad="12 bytes per parameter and slice on a disk that has less than that free",
    fixed="zero.offload_dir on a larger disk, or more ranks in mesh.dp_shard",
)

OFFLOAD_FILE_WORKS = Rule(
    id="offload-file-works",
    why="""
    What rests in a file is read and written all the time. When the system refuses (a disk that
    fails, a device that is pulled, a network file system that goes away, a file cut short from
    outside), slices are lost and the run ends. The last checkpoint is the source of truth: offload
    files never outlive a run.
    """,
    bad="a disk with read errors under zero.offload_dir",
    fixed="--resume RUN --set zero.offload_dir=DIR     # DIR is on a disk that works",
)

OFFLOAD_HOST_MEMORY = Rule(
    id="offload-host-memory",
    why="""
    Slices that rest in the memory of the host are allocated before the first step; with a GPU
    they are also locked there, so that it can copy them while it computes. A limit on the memory
    of a process, or on what it may lock, can refuse that.
    """,
    bad='zero.optimizer_offload = "host"     # and less free memory than all slices need',
    fixed='zero.optimizer_offload = "nvme"     # or a higher limit, or more ranks in mesh.dp_shard',
)
