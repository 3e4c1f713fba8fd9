# SPDX-License-Identifier: Apache-2.0
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

PROVE_APPLIED_ONCE = Rule(
    id="prove-applied-once",
    why="""
    Each server applies the gradient of each worker in each step once, and versions count its
    updates. A push that comes twice, after a link was mended, is applied once all the same.
    """,
    bad="on retry: apply(gradient)",
    fixed="on retry: apply(gradient) unless (worker, step) was applied",
)

PROVE_STALENESS_BOUND = Rule(
    id="prove-staleness-bound",
    why="""
    A worker begins a step only while it is at most servers.max_staleness steps ahead of the slowest
    (Ho et al., 2013): convergence is proven for a bound, and for none without it.
    """,
    bad="answer every push at once",
    fixed="answer when min(clocks) >= clock - max_staleness",
)

PROVE_REPLAYED_LOSS = Rule(
    id="prove-replayed-loss",
    why="""
    A worker says from which version of each server it computes. One process with these versions
    must find the same loss; another loss says that the worker had other parameters.
    """,
    bad="version = header.version; parameters of the pull before",
    fixed="version and parameters of one pull",
)

PROVE_REPLAY = Rule(
    id="prove-replay",
    why="""
    There is no order of asynchronous updates before a run. Given the recorded one (worker, step,
    version read, version applied to), one process that applies the same gradients in the same order
    must come to the same parameters, in float64 to 1e-10.
    """,
    bad="apply(gradient, rate)                      # whatever its staleness",
    fixed="apply(gradient, rate / (1 + staleness) ** damping)",
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
