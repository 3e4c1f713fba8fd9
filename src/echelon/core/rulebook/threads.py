"""Rules about replicas of a model on threads of one process."""

from echelon.core.rules import Rule

THREADS_ARE_ONE_PROCESS = Rule(
    id="threads-are-one-process",
    why="""
    Replicas on threads are the data parallelism of one process: every axis of the mesh is 1. Ranks
    of a mesh are processes of their own, which is the faster way to split a batch
    (mesh.dp_replicate), and their groups know nothing of threads.
    """,
    example="""
    [mesh]
    %s
    [threads]
    replicas = 2
    [batch]
    global_sequences = 4
    microbatch_sequences = 2
    """,
    bad="dp_replicate = 2",
    fixed="dp_replicate = 1",
)

THREADS_DIVIDE_MICROBATCH = Rule(
    id="threads-divide-microbatch",
    why="""
    A microbatch is scattered evenly over the replicas: each takes the same number of whole
    sequences, so threads.replicas must divide batch.microbatch_sequences.
    """,
    example="""
    [threads]
    %s
    [batch]
    global_sequences = 8
    microbatch_sequences = 4
    """,
    bad="replicas = 3",
    fixed="replicas = 2",
)

THREADS_FIT_NODE = Rule(
    id="threads-fit-node",
    why="""
    Threads of one process reach the devices of one host. Replicas on GPUs have one each, those on a
    CPU share its cores: more replicas than devices of a node would wait for one another.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [threads]
    %s
    [batch]
    global_sequences = 16
    microbatch_sequences = 16
    """,
    bad="replicas = 16",
    fixed="replicas = 8",
)

THREADS_SHARE_NOTHING = Rule(
    id="threads-share-nothing",
    why="""
    Replicas compute by themselves and meet twice a step: they get all parameters, and give all
    gradients. What needs the other tokens of a batch in the middle of a pass (experts, which are
    balanced over the global batch), what packs numbers by what is beside them (8-bit products),
    what cuts or moves model state (ZeRO, offload), what runs half of a backward pass later
    (schedules that split it), and PyTorch's compiler, which traces one thread, are for ranks.
    """,
    example="""
    [threads]
    replicas = 2
    [batch]
    global_sequences = 4
    microbatch_sequences = 2
    [pipeline]
    %s
    """,
    bad='schedule = "zb-h1"',
    fixed='schedule = "1f1b"',
)

THREADS_ARE_NOT_REHEARSED = Rule(
    id="threads-are-not-rehearsed",
    why="""
    A rehearsal steps one rank on tensors without elements, in a mode of PyTorch that belongs to one
    thread; and it proves the order of calls between ranks, of which one process has none. Prove
    such a plan, or rehearse ranks in its place.
    """,
    bad="echelon rehearse run.toml --set threads.replicas=2",
    fixed="echelon rehearse run.toml --set mesh.dp_replicate=2",
)
