# SPDX-License-Identifier: Apache-2.0
"""Rules about a module of your own: loop, tensor and pipeline parallelism, threads, strategies."""

from echelon.core.rules import Area, Rule

MODULE_MESH = Rule(
    id="module-mesh",
    why="""
    Data parallelism and ZeRO work on any module, for they only say where its parameters, gradients
    and optimizer state lie. Tensor and sequence parallelism cut its layers by rules, a pipeline
    between the blocks that `split` names, and context parallelism in its calls of attention. Ranks
    of `mesh.ep` are for the routers of Echelon's own models; stacks of experts of a module lie over
    its tensor ranks, by the rule `expert`.
    """,
    bad="ec.parallelize(model, ec.plan('toy-experts'))                # mesh.ep = 2",
    fixed="""
    plan = ec.plan('nano', settings=['mesh.tp=2'])
    ec.parallelize(model, plan, tensor={'blocks.*.experts': 'expert'})
    """,
)

MODULE_SETTINGS = Rule(
    id="module-settings",
    why="""
    A plan is made for Echelon's own models. What it says of their blocks has no meaning for a
    module of another kind, and is refused so that nobody counts on it: recomputation (use
    torch.utils.checkpoint in your forward), Muon (which needs to know which matrices are those of
    hidden layers), products of 8-bit numbers, parameters gathered and gradients summed in fewer
    bits, secondary slices, parameter servers, and experts (whose loads, biases and losses are those
    of our routers; give a dense model, whatever experts your module has). In a pipeline, slices of
    parameters stay on the device.
    """,
    bad="ec.parallelize(model, ec.plan('nano', settings=['optimizer.kind=muon']))",
    fixed="ec.parallelize(model, ec.plan('nano', settings=['optimizer.kind=adamw']))",
)

MODULE_ARGUMENT = Rule(
    id="module-argument",
    why="""
    `parallelize` takes words for what happens to parameters without a gradient, how gradients of
    data ranks are joined, who sets the learning rate, and whether guessed rules will do. Another
    word is a slip of the pen. And what a pipeline gathers at a time is a stage: no other `units`.
    """,
    bad="ec.parallelize(model, plan, gradients='average')",
    fixed="ec.parallelize(model, plan, gradients='mean')",
)

MODULE_RANKS = Rule(
    id="module-ranks",
    why="""
    `parallelize` is called in a process of its own for every rank of the mesh, after they have
    joined one process group. A mesh of one rank needs no group.
    """,
    bad="python train.py                              # a plan of 4 ranks",
    fixed="""
    torchrun --nproc-per-node 4 train.py
    # in train.py: torch.distributed.init_process_group("gloo"), then ec.parallelize(model, plan)
    """,
)

MODULE_PARAMETERS = Rule(
    id="module-parameters",
    why="""
    Parameters move into flat buckets, with their values: they must have some (a parameter on the
    meta device has none), all be on one device, and be real numbers where they are trained. A
    module is given to `parallelize` once.
    """,
    bad="""
    with torch.device("meta"):
        model = Net()
    ec.parallelize(model, plan)
    """,
    fixed="""
    model = Net()
    ec.parallelize(model, plan)
    """,
)

MODULE_SAME = Rule(
    id="module-same",
    why="""
    Every rank must hold the same module: the same names, shapes and dtypes in the same order, the
    same parameters frozen, the same buffers, the same plan. Values of parameters may differ, and
    become those of rank 0; buffers stay what they are on each rank, so they must be equal at the
    start.
    """,
    bad="model = Net(width=64 + rank)",
    fixed="model = Net(width=64)",
)

MODULE_UNITS = Rule(
    id="module-units",
    why="""
    At stage 3 the parameters of a module are gathered and freed by unit: a part of the module that
    has a forward of its own. By default these are the children of its largest list of modules of
    one class; they can be named, or chosen by class or by size.
    """,
    bad="ec.parallelize(model, plan, units=['block0'])           # the module calls it blocks.0",
    fixed="ec.parallelize(model, plan, units=['blocks.0', 'blocks.1'])",
)

MODULE_IGNORE = Rule(
    id="module-ignore",
    why="""
    What is ignored stays as it is on every rank: it is named as in `named_parameters`, or as the
    module that holds it. A name that ignores nothing is a slip of the pen, and a module of which
    nothing is left to train needs no optimizer.
    """,
    bad="ec.parallelize(model, plan, ignore=['backbon'])",
    fixed="ec.parallelize(model, plan, ignore=['backbone'])",
)

UNUSED_PARAMETER = Rule(
    id="unused-parameter",
    why="""
    A parameter that got no gradient in any backward of a step is mostly a mistake: a layer that is
    never called, or a branch that some ranks take and others do not. Nothing hangs, and by default
    every rank raises this before anything is updated. Where it is meant, unused="zero" counts the
    gradient of such a rank as zero.
    """,
    bad="""
    model, optimizer = ec.parallelize(model, plan)
    y = model.left(x) if rank == 0 else model.right(x)
    """,
    fixed='model, optimizer = ec.parallelize(model, plan, unused="zero")',
)

SECOND_BACKWARD = Rule(
    id="second-backward",
    why="""
    A backward outside of no_sync() sums gradients over the ranks. A second one before step() would
    sum what is a sum already. Where several backward passes belong to one step, all but the last
    stand in no_sync(); one that was not meant to count is dropped by zero_grad(). (With
    zero.accumulate = "slices" every backward is summed by itself, and any number may come.)
    """,
    example="""
    %s
    second.backward()
    optimizer.step()
    """,
    bad="first.backward()",
    fixed="""
    with optimizer.no_sync():
        first.backward()
    """,
)

BACKWARD_INTERRUPTED = Rule(
    id="backward-interrupted",
    why="""
    An error inside of backward leaves some gradients of this rank summed over the ranks and others
    not, while the other ranks went on. The gradients of this step are lost; go on from a
    checkpoint.
    """,
    bad="""
    try:
        loss.backward()
    except RuntimeError:
        continue
    """,
    fixed="loss.backward()",
)

RANKS_IN_STEP = Rule(
    id="ranks-in-step",
    why="""
    One optimizer step is one step on all ranks, with the same learning rate: each rank updates
    slices of the same parameters, and the pieces must fit together.
    """,
    bad="optimizer.param_groups[0]['lr'] = 1e-3 * (rank + 1)",
    fixed="optimizer.param_groups[0]['lr'] = 1e-3",
)

LEARNING_RATE_OWNER = Rule(
    id="learning-rate-owner",
    why="""
    By default the learning rate is that of the plan at each step. A scheduler of torch, or a loop
    that writes param_groups[0]["lr"], would be overwritten; say that the rate is yours, and the
    plan's schedule is not used.
    """,
    example="""
    %s
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    """,
    bad="model, optimizer = ec.parallelize(model, plan)",
    fixed='model, optimizer = ec.parallelize(model, plan, learning_rate="own")',
)

LOSS_NOT_SCALED = Rule(
    id="loss-not-scaled",
    why="""
    With a loss scale, backward starts from the loss times that scale, and step() divides the
    gradients by it. A loss that was not scaled would give gradients that are far too small.
    """,
    bad="loss.backward()",
    fixed="optimizer.scale(loss).backward()",
)

FROZEN_CHANGED = Rule(
    id="frozen-changed",
    why="""
    Which parameters are trained is known when the module is split: the others have no gradient and
    no optimizer state anywhere. Freeze and unfreeze before `parallelize`.
    """,
    bad="""
    model, optimizer = ec.parallelize(model, plan)
    model.backbone.requires_grad_(True)
    """,
    fixed="""
    model.backbone.requires_grad_(True)
    model, optimizer = ec.parallelize(model, plan)
    """,
)

VALUES_AWAY = Rule(
    id="values-away",
    why="""
    At stage 3 a rank holds slices of the parameters, which are whole only while they are computed
    with; a tensor rank holds pieces of some, and a rank of a pipeline those of its own stages. And
    where the optimizer updates a copy in a wider dtype, values that are loaded into the parameters
    alone would be lost. Inside of optimizer.whole(), on all ranks, the parameters can be read and
    written; what is written is kept. Forwards come after it: layers of a tensor rank compute with
    its pieces. optimizer.full_state() streams everything to rank 0.
    """,
    bad="torch.save(model.state_dict(), path)",
    fixed="""
    with optimizer.whole():
        if rank == 0:
            torch.save(model.state_dict(), path)
    """,
)

FORWARD_THROUGH_MODULE = Rule(
    id="forward-through-module",
    why="""
    At stage 3 the parameters of a unit are made whole when the module that was given to
    `parallelize` is called and comes to that unit. A unit that is called by itself has no values.
    """,
    bad="y = model.blocks[0](x)",
    fixed="y = model(x)",
)

UNIT_OUT_OF_ORDER = Rule(
    id="unit-out-of-order",
    why="""
    At stage 3 units are gathered by all ranks in one order, that of the first step, and each is
    freed after its use. A unit may be left out, on some ranks too, but one that comes after its
    turn is gone, and this rank alone cannot gather it again. Units that are used several times, or
    in another order on another rank, in the first step already, are kept whole for each pass.
    """,
    bad="order = sorted(self.blocks, key=lambda _: random.random())      # in forward",
    fixed="ec.parallelize(model, plan, units=['encoder', 'decoder'])     # the blocks as one unit",
)

MODULE_STATE = Rule(
    id="module-state",
    why="""
    optimizer.state_dict() is that of one rank's slices. It fits the same module, plan and rank
    only. A file of optimizer.save() has whole tensors, and fits the same module under any layout of
    the same precision and kind of optimizer.
    """,
    bad="optimizer.load_state_dict(torch.load('rank0.pt'))        # on rank 1",
    fixed="optimizer.load('state.pt')        # of optimizer.save('state.pt'), on every rank",
)

BACKWARD_TWICE = Rule(
    id="backward-of-backward",
    why="""
    At stage 3 a unit is freed when its backward is over. The backward of a backward
    (create_graph=True: penalties on gradients, second derivatives) would read it again; it needs
    whole parameters, as at stages 0 to 2.
    """,
    bad="torch.autograd.grad(loss, x, create_graph=True)         # zero.stage = 3",
    fixed="torch.autograd.grad(loss, x, create_graph=True)         # zero.stage = 2",
)


MODULE_TENSOR_AREA = Area("module_tensor")
"""Tensor and sequence parallelism of a module of your own."""

MODULE_TENSOR_RULES = Rule(
    id="module-tensor-rules",
    why="""
    Which layers are cut by columns, by rows or by their vocabulary is said by the names of modules
    or parameters; `*` stands for one part of a name. A model of transformers may say it itself.
    Each pattern must name something, each thing is named once, and the words are column, row,
    column-gathered, row-scattered, vocabulary, expert, replicated, summed and, for a whole number
    that a module keeps (its heads), divide.
    """,
    bad="ec.parallelize(model, plan, tensor={'layers.*.q_prj': 'column'})     # q_proj is meant",
    fixed="ec.parallelize(model, plan, tensor={'layers.*.q_proj': 'column'})    # and its row",
)

MODULE_TENSOR_SPLIT = Rule(
    id="module-tensor-split",
    why="""
    Linear layers (and the Conv1D of GPT-2) and embeddings can be cut: their sizes, heads included,
    must be multiples of the tensor ranks (a vocabulary is padded). A parameter that several modules
    share is cut in all of them alike or in none. Experts are stacks [E, ...] in one module, called
    with tokens, the numbers of their experts and gates; E is a multiple, too. Buffers whose size is
    one that is cut, dropout (its random numbers would depend on the split), convolutions and
    recurrent layers are left whole or are refused: leave them without a rule, and every rank
    computes them.
    """,
    bad="ec.parallelize(model, ec.plan(..., settings=['mesh.tp=4']), tensor=rules)   # 6 heads",
    fixed="ec.parallelize(model, ec.plan(..., settings=['mesh.tp=2']), tensor=rules)   # 6 heads",
)

MODULE_TENSOR_GUESS = Rule(
    id="module-tensor-guess",
    why="""
    Rules that were guessed from one forward pass may be wrong in what that pass did not show. They
    are printed, and nothing trains by them until you have proven them (`echelon prove --module`)
    and either passed them as your own or said guess="accept".
    """,
    bad="ec.parallelize(model, plan, tensor='guess', example=(tokens,))",
    fixed="ec.parallelize(model, plan, tensor='guess', example=(tokens,), guess='accept')",
)

MODULE_TENSOR_RANKS = Rule(
    id="module-tensor-ranks",
    why="""
    Tensor ranks compute one batch together: each must be given the same one (that of the data rank,
    `optimizer.data_rank`). And a parameter that is whole on every rank must have the same gradient
    on all of them, unless its rule says that it works on parts ("summed": a norm of each head).
    A buffer that a forward changes (a running mean) must come out the same on all of them, too.
    All three are looked at in the first step.
    """,
    bad="batch = batches[rank]                               # mesh.tp = 2",
    fixed="batch = batches[optimizer.data_rank]                # mesh.tp = 2",
)

MODULE_SEQUENCE = Rule(
    id="module-sequence",
    why="""
    With mesh.sequence_parallel each tensor rank holds its part of every sequence between the split
    layers of the blocks: from the first block's input to the last block's output. The module needs
    blocks (`units` names them otherwise), whose first tensor is the stream, with positions as its
    last dim but one, as many as the tensor ranks divide.
    """,
    bad="model(tokens[:, :1023])       # mesh.tp = 2, sequence_parallel = true",
    fixed="model(tokens[:, :1024])       # mesh.tp = 2, sequence_parallel = true",
)


MODULE_PIPELINE_AREA = Area("module_pipeline")
"""A module of your own that `parallelize` cuts into pipeline stages."""

MODULE_SPLIT = Rule(
    id="module-split",
    why="""
    A pipeline stage of your own module is a run of its blocks: `split` names the ModuleList or
    Sequential that its forward goes through, as in `named_modules`. What comes before the blocks is
    the first stage's, what comes after them the last one's. The plan says which blocks each stage
    has, so `model.layers` of the plan is the number of blocks.
    """,
    bad="ec.parallelize(model, plan, split='layers', ...)        # they are in model.layers",
    fixed="ec.parallelize(model, plan, split='model.layers', ...)",
)

MODULE_CHAIN = Rule(
    id="module-chain",
    why="""
    Only one tensor travels from stage to stage. So blocks must be a chain: each is called once, in
    order, and gives one tensor, which the next one takes. What else a block takes (masks, position
    embeddings) is computed on each stage from the batch alone, and has no gradient. Parameters that
    are not of a stage read as NaN there, so that nothing can depend on them unseen.
    """,
    bad="""
    for block in self.blocks:
        x = block(x, first)         # first = self.embedding(tokens): an activation of stage 0
    """,
    fixed="""
    for block in self.blocks:
        x = block(x, positions)     # computed from the batch alone
    """,
)

MODULE_SHARED = Rule(
    id="module-shared",
    why="""
    A parameter is of one stage, or of the first and of the last (a tied embedding): its gradients
    are then summed over both ends. What other stages share would have to be summed over them, too.
    """,
    bad="self.blocks[3].mlp.weight = self.blocks[0].mlp.weight      # in two stages",
    fixed="self.blocks[1].mlp.weight = self.blocks[0].mlp.weight      # in one stage",
)

MODULE_LOSS = Rule(
    id="module-loss",
    why="""
    Under pipeline and context parallelism the step is Echelon's: `optimizer.backward(batch)` takes
    the global batch. For it, `loss` says what is added up and what it is divided by: "causal" (next
    tokens against `labels`, where -100 does not count), or two functions, the sum of the losses of
    a microbatch from the module's output and the batch, and the number that it counts, from the
    batch alone. `example` is one microbatch, by which the module's forward is followed once.
    """,
    bad="model, optimizer = ec.parallelize(model, plan, split='model.layers')",
    fixed="""
    model, optimizer = ec.parallelize(
        model, plan, split='model.layers', loss='causal', example=batch
    )
    """,
)

MODULE_BATCH = Rule(
    id="module-batch",
    why="""
    `optimizer.backward` takes the same global batch on every rank: a mapping of names to tensors
    whose first dim has as many samples as the plan says. Each rank takes its own microbatches of
    it. A step has one backward, and then `optimizer.step()`; the loss of a batch without a step is
    `optimizer.evaluate(batch)`.
    """,
    bad="optimizer.backward(next(batches_of_this_rank))",
    fixed="optimizer.backward(next(batches))        # the same on every rank",
)

STAGE_FORWARD = Rule(
    id="stage-forward",
    why="""
    On a rank of a pipeline only its own stages have parameters, so the module cannot be called as a
    whole. `optimizer.backward(batch)` and `optimizer.evaluate(batch)` run it over all ranks.
    """,
    bad="logits = model(input_ids)",
    fixed="loss = optimizer.evaluate(batch)",
)


MODULE_CONTEXT_AREA = Area("module_context")
"""The sequences of a module of your own, cut over context ranks."""

MODULE_ATTENTION = Rule(
    id="module-attention",
    why="""
    Over context ranks each holds some positions of every sequence, and attention is the one place
    where positions meet. So it must be seen: a module calls
    torch.nn.functional.scaled_dot_product_attention (in transformers attn_implementation="sdpa"),
    with a causal mask, a window, or none. Attention that is computed otherwise, a mask of another
    kind, dropout in it, positions that are counted inside of the module, and checkpointing around
    it are refused. What is seen of `example` is checked: the outputs of the cut module must be
    those of the whole one.
    """,
    bad="model = AutoModelForCausalLM.from_config(config, attn_implementation='eager')",
    fixed="model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa')",
)


STRATEGY_AREA = Area("strategy")
"""Strategies by name, and about what is made in their scope."""

STRATEGY_KNOWN = Rule(
    id="strategy-known",
    why="""
    `ec.strategy` takes a name of `echelon compare --strategies`, or what TensorFlow, PyTorch or
    Horovod call one of these. Some of their strategies are none here; the message says what to take
    instead. docs/guides/strategies.md has the table.
    """,
    bad='ec.strategy("TPUStrategy", ranks=8)',
    fixed='ec.strategy("mirrored", ranks=8)',
)

STRATEGY_RANKS = Rule(
    id="strategy-ranks",
    why="""
    A strategy is for a number of ranks, one at the least. Where a launcher has started ranks, it is
    for all of them.
    """,
    bad='ec.strategy("mirrored", ranks=0)',
    fixed='ec.strategy("mirrored", ranks=2)',
)

STRATEGY_SETTINGS = Rule(
    id="strategy-settings",
    why="""
    A strategy says how a run is split: the mesh, ZeRO's stage, threads. A setting that says
    otherwise would make it another strategy under the same name. Name the other one, or make a plan
    without a strategy.
    """,
    bad='scope.model("nano", settings=["mesh.tp=2"])       # in the scope of "mirrored"',
    fixed='scope.model("nano", settings=["optimizer.learning_rate=1e-3"])',
)

STRATEGY_SCOPE = Rule(
    id="strategy-scope",
    why="""
    What a strategy splits is made in its scope: then every parameter is one of the strategy's
    variables. A module that was made before, or elsewhere, may have parameters that others hold on
    to; a scope that has been left makes nothing any more. (TensorFlow refuses variables of another
    scope for the same reason.)
    """,
    bad="""
    model = Net()
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        model, optimizer = scope.parallelize(model)
    """,
    fixed="""
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        model, optimizer = scope.parallelize(Net())
    """,
)


THREADS_AREA = Area("threads")
"""Replicas of a module on threads of one process."""

THREADED_ARGUMENT = Rule(
    id="threaded-argument",
    why="""
    `ec.threaded` takes either how many replicas there are (`replicas`, at least 1: on the GPUs of
    the host where the module is on one, else on the CPU) or where each is (`devices`, all of one
    type, CPUs or GPUs that are there, no GPU twice; the first is where the module is). `dim` is the
    dim along which the batch is cut, from 0; `whole` names arguments of the module's forward.
    """,
    bad="ec.threaded(model, devices=['cpu', 'cuda:0'])",
    fixed="ec.threaded(model, devices=['cpu', 'cpu'])",
)

THREADED_MODULE = Rule(
    id="threaded-module",
    why="""
    A replica is a copy of the module's tree with tensors of its own. So all parameters and buffers
    must be on the first device, and have values (none on the meta device, none that a first forward
    pass must make). What is no such tree cannot be copied so: a module that PyTorch's compiler or
    TorchScript has taken in, or one that is on threads or wrapped for ranks already.
    """,
    bad="ec.threaded(torch.compile(model), replicas=2)",
    fixed="ec.threaded(model, replicas=2)",
)

THREADED_BATCH = Rule(
    id="threaded-batch",
    why="""
    All tensors among the arguments are cut along one dim, in tuples, lists and dicts too, so they
    have the same number of rows there. A tensor that belongs to all rows (a mask of positions, a
    table) is named in `whole`; a tensor without dims and what is no tensor go to every replica.
    What hides tensors in an object of another kind cannot be cut: pass its tensors.
    """,
    bad="ec.threaded(model, replicas=2)(tokens, mask=mask)   # tokens [8, 128], mask [128, 128]",
    fixed="ec.threaded(model, replicas=2, whole=['mask'])(tokens, mask=mask)",
)

THREADED_OUTPUT = Rule(
    id="threaded-output",
    why="""
    Outputs of replicas are joined along the dim along which the batch was cut: tensors of one shape
    but for that dim, in tuples, lists and dicts that are alike on all replicas. Numbers without
    dims become a vector, one for each replica. What is no tensor must be the same on all.
    """,
    bad="return loss.item()",
    fixed="return loss",
)

THREADED_STEP = Rule(
    id="threaded-step",
    why="""
    Inside of `with model.step():` parameters are replicated once, so they stay as they are until it
    ends. An optimizer step inside would leave all replicas but the first with old parameters.
    """,
    bad="""
    with model.step():
        for part in batch:
            model(part).sum().backward()
            optimizer.step()
    """,
    fixed="""
    with model.step():
        for part in batch:
            model(part).sum().backward()
    optimizer.step()
    """,
)
