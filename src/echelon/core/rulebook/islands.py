# SPDX-License-Identifier: Apache-2.0
"""Rules about islands of local SGD, and about the loss of islands."""

from echelon.core.rules import Area, Rule

LOCAL_SGD_AREA = Area("local_sgd")
"""Islands of ranks that train alone between meetings."""

LOCAL_SGD_NEEDS_ISLANDS = Rule(
    id="local-sgd-needs-islands",
    why="""
    With `local_sgd.every` each coordinate of `dp_replicate` is an island: it trains alone for so
    many steps, and then meets the others (Stich, 2018). With one replica there is nobody to meet.
    Ranks of `dp_shard` are inside of an island, and sum their gradients in each step.
    """,
    example="""
    [mesh]
    %s
    [local_sgd]
    every = 50
    """,
    bad="dp_replicate = 1",
    fixed="dp_replicate = 2",
)

LOCAL_SGD_ISLANDS_ARE_REPLICAS = Rule(
    id="local-sgd-islands-are-replicas",
    why="""
    The number of islands is mathematics: so many trainings are averaged, each of its own samples.
    It is that of `mesh.dp_replicate`. Written down as `local_sgd.islands` it keeps another mesh
    from continuing a run as if nothing had changed; both must say the same.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    %s
    """,
    bad="islands = 4",
    fixed="islands = 2",
)

LOCAL_SGD_FRAGMENTS_FIT = Rule(
    id="local-sgd-fragments-fit",
    why="""
    A model in several fragments has one of them meet in each of as many steps of a round
    (Douillard et al., "Streaming DiLoCo", 2025). A fragment is made of whole blocks, so there are
    at most as many as blocks, and each has a step of its own, so there are at most as many as steps
    of a round.
    """,
    example="""
    [model]
    layers = 4
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 8
    %s
    """,
    bad="fragments = 6",
    fixed="fragments = 4",
)

LOCAL_SGD_DELAY_FITS = Rule(
    id="local-sgd-delay-fits",
    why="""
    What comes of a meeting may be applied some steps later, while it travels. It must be applied
    before the same fragment meets again: in less than a round.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 8
    %s
    """,
    bad="delay = 8",
    fixed="delay = 5",
)

LOCAL_SGD_ENDS_WITH_A_ROUND = Rule(
    id="local-sgd-ends-with-a-round",
    why="""
    The model of a run is what its islands agreed on last. Steps after the last meeting would be
    lost, each island's its own; so a run is whole rounds, and with a delay as many steps more as
    the last outer step is late.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 8
    [train]
    %s
    """,
    bad="steps = 100",
    fixed="steps = 96",
)

LOCAL_SGD_ISLANDS_FILL_NODES = Rule(
    id="local-sgd-islands-fill-nodes",
    why="""
    Islands are blocks of consecutive ranks. Where an island had parts of nodes that it shares with
    others, the same group would cross nodes in one island and not in the next, and no formula
    would give the bytes of both. So an island is whole nodes, or nodes are whole islands.
    """,
    example="""
    [cluster]
    preset = "16xh100"
    [mesh]
    dp_replicate = 2
    %s
    [local_sgd]
    every = 50
    """,
    bad="dp_shard = 6",
    fixed="dp_shard = 8",
)

LOCAL_SGD_KEEPS_STATE_NEAR = Rule(
    id="local-sgd-keeps-state-near",
    why="""
    An outer step reads and writes what the optimizer updates, and outer state of the same size, all
    at once. State that rests in the memory of the host or in files is brought bucket by bucket for
    the inner optimizer alone; outer steps of it are not built.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    dp_shard = 2
    [zero]
    stage = 1
    %s
    [local_sgd]
    every = 50
    """,
    bad='optimizer_offload = "host"',
    fixed='optimizer_offload = "none"',
)

LOCAL_SGD_SCALES_OF_BLOCKS = Rule(
    id="local-sgd-scales-of-blocks",
    why="""
    Scales of whole tensors in 8 bits come from the steps before. An outer step moves weights by as
    much as many inner steps do, so a scale of before would not fit. Scales of blocks are those of
    the weights themselves, in every step.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [precision]
    matmul = "fp8"
    %s
    [local_sgd]
    every = 50
    """,
    bad='fp8_scales = "tensor"',
    fixed='fp8_scales = "block"',
)

LOCAL_SGD_CODES_SAVE_BYTES = Rule(
    id="local-sgd-codes-save-bytes",
    why="""
    Each of I islands gathers the codes of all others: I - 1 bytes of each number, against
    8 (I - 1) / I of a sum in float32. With 8 islands or more these are no fewer, and codes are not
    exact. Codes that come late are not built: their outer step is taken in the step of the meeting.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    gradients = "int8"
    %s
    """,
    bad="delay = 5",
    fixed="delay = 0",
)

LOCAL_SGD_MASTERS_ARE_WIDE = Rule(
    id="local-sgd-masters-are-wide",
    why="""
    An outer gradient is a difference of values that are nearly the same: in a dtype of few digits
    most of it would be rounding. So the values that the optimizer keeps are of float32 or float64;
    what forward and backward compute in may be narrow.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [precision]
    parameters = "bf16"
    %s
    [local_sgd]
    every = 50
    """,
    bad='master = "bf16"',
    fixed='master = "fp32"',
)

LOCAL_SGD_IN_THE_TRAINER = Rule(
    id="local-sgd-in-the-trainer",
    why="""
    Outer steps are taken by our own trainer (`echelon train`). `ec.parallelize` returns a module
    and an optimizer whose steps are those of one training over all ranks.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    %s
    """,
    bad="every = 50          # and ec.parallelize(model, plan)",
    fixed="every = 0",
)


LOST_ISLANDS_AREA = Area("lost_islands")
"""Islands of local SGD that may be lost while the others go on."""

LOCAL_SGD_MIN_ISLANDS = Rule(
    id="local-sgd-min-islands",
    why="""
    `local_sgd.min_islands` says with how few islands a run goes on when others are lost. A run that
    starts with fewer would end at once.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    %s
    """,
    bad="min_islands = 3",
    fixed="min_islands = 1",
)

LOST_ISLANDS_MEET_AT_ONCE = Rule(
    id="lost-islands-meet-at-once",
    why="""
    A meeting of islands that may be lost counts for all ranks or for none, and is held again with
    those that are left. So an outer step is taken in the step of its meeting, from differences as
    they are: a sum that is still under way when an island is lost (`delay`), or codes of 8 bits
    that each island gathers, are not built for it.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    %s
    """,
    bad="delay = 5",
    fixed="delay = 0",
)

LOST_ISLANDS_NEED_GLOO = Rule(
    id="lost-islands-need-gloo",
    why="""
    Islands that may be lost meet in groups that are made while they train, each time that others
    are there, and that end with an error where a member is lost. Gloo's do so; a communicator of
    NCCL with a lost member can only be aborted, with what it has in flight on the device.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    %s
    """,
    bad="min_islands = 1",
    fixed='min_islands = "all"',
)

LOST_ISLANDS_HOLD_DENSE_MODELS = Rule(
    id="lost-islands-hold-dense-models",
    why="""
    Routers of experts have biases and loads that each island keeps for itself, beside what islands
    agree on. An island that comes back gets what islands agree on; biases of routers are not among
    it.
    """,
    example="""
    [model]
    %s
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    """,
    bad='preset = "mixtral-8x7b"',
    fixed='preset = "nano"',
)

LOST_ISLANDS_LEAVE_NO_VALIDATION = Rule(
    id="lost-islands-leave-no-validation",
    why="""
    Validation is a mean over all islands: each reads its share of the held-out batches, and all
    wait for it. Where a run goes on without lost islands nobody may wait for one, so it is not
    validated while it trains. Its checkpoints can be: `echelon train` from one with
    `min_islands = "all"`.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    [train]
    %s
    """,
    bad="validate_every = 50",
    fixed='validate_every = "never"',
)

LOST_ISLANDS_SAVE_AT_MEETINGS = Rule(
    id="lost-islands-save-at-meetings",
    why="""
    Only at the end of a round all islands that are there know who is there: between two meetings
    one may be lost, and the others would wait for its part of a checkpoint. So checkpoints are
    written where rounds end.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    [checkpoint]
    %s
    """,
    bad="every = 75",
    fixed="every = 100",
)

LOST_ISLANDS_NEED_OUR_LAUNCHER = Rule(
    id="lost-islands-need-our-launcher",
    why="""
    torchrun ends all of its processes when one has failed, and starts all of them again or none. So
    `local_sgd.min_islands` works where Echelon starts the ranks itself, on one machine.
    """,
    bad="torchrun --nproc-per-node 4 -m echelon train run.toml      # local_sgd.min_islands = 1",
    fixed="echelon train run.toml",
)

ISLANDS_ARE_THERE = Rule(
    id="islands-are-there",
    why="""
    An island that was started again gets the outer parameters from one that has trained on. Where
    the last of these is lost before it is in, nobody has them any more, and the run ends; it goes
    on from its last checkpoint.
    """,
    bad="kill -9 of a rank of every island within a second",
    fixed="echelon train run.toml --resume runs/first",
)

PROVE_LOST_ISLAND = Rule(
    id="prove-lost-island",
    why="""
    An island that is lost in the middle of a meeting leaves others with parts of what it moved. All
    ranks of all islands that are left take the outer step with it, or all without it: each tells
    the same islands at the same meetings. One that was started again comes in at the end of a round
    that all of them say, and is in every meeting after it.
    """,
    bad="take the outer step when this rank has its sums",
    fixed="take the outer step when every rank of every island that met has its sums",
)

PROVE_MEETINGS_REPLAYED = Rule(
    id="prove-meetings-replayed",
    why="""
    Who is lost when is not known before a run. Given the recorded islands of each meeting, one
    process that trains them one after another must come to the same outer parameters, momentum and
    parameters of each island, in float64 to 1e-10. The mean is over the islands that met, and one
    that comes back goes on from the outer parameters and momentum of the others, with an inner
    optimizer that begins anew.
    """,
    bad="sum / islands                # one of them was not there",
    fixed="sum / islands that met",
)
