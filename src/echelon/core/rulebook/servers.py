"""Rules about parameter servers."""

from echelon.core.rules import Rule

SERVERS_SPLIT_SAMPLES = Rule(
    id="servers-split-samples",
    why="""
    The workers of parameter servers are whole replicas that read different samples: each pushes the
    gradient of the whole model and pulls all parameters (Li et al., 2014). Where ranks hold parts
    of the model (tensor, context, pipeline or expert parallelism, ZeRO), no worker has the whole
    gradient to push. Servers already share out what ZeRO would: optimizer state.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    %s
    [batch]
    global_sequences = 4
    """,
    bad="""
    tp = 2
    [servers]
    count = 1
    """,
    fixed="""
    [servers]
    count = 1
    """,
)

ASYNCHRONOUS_SERVERS_NEED_GLOO = Rule(
    id="asynchronous-servers-need-gloo",
    why="""
    An asynchronous server waits for each of its workers in a thread of its own, and answers
    whichever comes. Messages of NCCL are kernels on the device, in one order that both ends know
    before; Gloo's are of the host, and any thread waits for its own.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_replicate = 2
    [batch]
    global_sequences = 4
    [servers]
    count = 1
    %s
    """,
    bad='updates = "asynchronous"',
    fixed='updates = "synchronous"',
)

ASYNCHRONOUS_SERVERS_SCALE_NO_LOSS = Rule(
    id="asynchronous-servers-scale-no-loss",
    why="""
    A dynamic loss scale follows the overflows that all ranks agree on after each step. Asynchronous
    workers agree on nothing, and two of them may be in steps with other scales. In float32 and
    bfloat16 no scale is needed.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [batch]
    global_sequences = 4
    [servers]
    count = 1
    updates = "asynchronous"
    [precision]
    parameters = "fp16"
    gradients = "fp16"
    reduction = "fp16"
    %s
    """,
    bad='loss_scaling = "dynamic"',
    fixed='loss_scaling = "none"',
)

ASYNCHRONOUS_ORDER_IS_NOT_KNOWN = Rule(
    id="asynchronous-order-is-not-known",
    why="""
    A rehearsal proves that the calls of all ranks have one order. Asynchronous servers apply what
    comes first, so there is none before the run. `echelon prove` runs one, records the order, and
    replays it in one process; late completion needs one order, too.
    """,
    bad="echelon rehearse run.toml --set servers.updates=asynchronous",
    fixed="echelon prove run.toml --set servers.updates=asynchronous",
)

SERVERS_UPDATE_ELEMENTS = Rule(
    id="servers-update-elements",
    why="""
    A server holds a range of the elements of each bucket and updates it by itself, so the update of
    an element may depend on that element, its gradient and its state only, as in AdamW and SGD.
    Muon makes a whole matrix orthogonal, which no server has.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [servers]
    count = 1
    [batch]
    global_sequences = 4
    [optimizer]
    %s
    """,
    bad='kind = "muon"',
    fixed='kind = "adamw"',
)

SERVERS_HOLD_DENSE_MODELS = Rule(
    id="servers-hold-dense-models",
    why="""
    Routers of experts balance loads with sums over all ranks that train, and scales of whole
    tensors in 8 bits come from such sums. Both are state beside the parameters that no server keeps
    yet.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [servers]
    count = 1
    [batch]
    global_sequences = 4
    [model]
    %s
    """,
    bad='preset = "mixtral-8x7b"',
    fixed='preset = "nano"',
)
