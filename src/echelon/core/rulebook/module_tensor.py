# SPDX-License-Identifier: Apache-2.0
"""Rules about tensor and sequence parallelism of a module of your own."""

from echelon.core.rules import Rule

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
