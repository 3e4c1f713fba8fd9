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
