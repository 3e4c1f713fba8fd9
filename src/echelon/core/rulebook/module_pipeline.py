# SPDX-License-Identifier: Apache-2.0
"""Rules about a module of your own that `parallelize` cuts into pipeline stages."""

from echelon.core.rules import Rule

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
