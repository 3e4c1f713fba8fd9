# SPDX-License-Identifier: Apache-2.0
"""Rules of `echelon prove --subject FILE`: proof for code that is not ours."""

from echelon.core.rules import Rule

VERIFY_FILE = Rule(
    id="verify-file",
    why="""
    A subject is a Python file with a mesh and two functions: `one_device` builds the training as it
    should be, `on_rank` the program of one rank. Every rank imports the file by itself.
    """,
    bad="echelon prove --subject train.py                # no one_device in it",
    fixed="echelon prove --subject verify_ddp.py      # one_device, on_rank and MESH in it",
)

VERIFY_MESH = Rule(
    id="verify-mesh",
    why="""
    `MESH` names the axes of the program, outermost first, and their degrees. The number of ranks is
    their product; wrong factors and wrong ranks are told by these axes.
    """,
    bad='MESH = {"dp": 2, "tp": 2}                      # with --ranks 2',
    fixed='MESH = {"dp": 2, "tp": 2}                    # with --ranks 4, or without --ranks',
)

VERIFY_RETURNED = Rule(
    id="verify-returned",
    why="""
    `one_device` returns an `ec.OneDevice` with a model, a loss function and an optimizer, `on_rank`
    an `ec.OnRank` with a model (or an engine), an optimizer, and `step` or `run`. A step returns
    its loss as a number, None on a rank that has none, or a mapping that holds it.
    """,
    bad="def on_rank(case): return model, optimizer",
    fixed="def on_rank(case): return ec.OnRank(model=model, step=step, optimizer=optimizer)",
)

VERIFY_RAISED = Rule(
    id="verify-raised",
    why="""
    A function of the file raised an error. It is told with the rank, the step and the line; the
    other ranks are ended.
    """,
    bad="def step(number): return loss_of(model, batches[number])     # a list of two",
    fixed="def step(number): return loss_of(model, batch(number))     # of every step",
)

VERIFY_NAMES = Rule(
    id="verify-names",
    why="""
    Every parameter of a rank is a parameter of one device, or a part of one. Placement is read from
    what frameworks know (DTensor, FSDP, ZeRO, Megatron's attributes). Where the program splits by
    hand or has other names, `OnRank.names` says what is what; one entry with {layer} covers all
    layers.
    """,
    bad="OnRank(model=model, ...)                        # q [8, 16] here, [16, 16] on one device",
    fixed="""
    OnRank(model=model, names={
        "blocks.{layer}.q.weight": ec.Logical(name="blocks.{layer}.q.weight", dim=0, axis="tp"),
    })
    """,
)

VERIFY_OPTIMIZER = Rule(
    id="verify-optimizer",
    why="""
    Gradients are read at the moment when the optimizer takes them. The optimizer must be one of
    torch, or of an engine that is known; and each step must call it once at least.
    """,
    bad="OnRank(model=model, step=step)                  # nothing says who updates",
    fixed="OnRank(model=model, step=step, optimizer=optimizer)",
)

VERIFY_LOCAL_GRADIENTS = Rule(
    id="verify-local-gradients",
    why="""
    Before they are reduced, the gradients of all ranks add up to that of one device, but for a
    factor that is a degree of the mesh or a number of microbatches (a mean instead of a sum). Where
    this fails, each rank's own backward is wrong, and no reduction can mend it.
    """,
    bad="loss = local_sum / local_tokens                 # ranks hold different numbers of tokens",
    fixed="loss = local_sum * dp / all_reduce(local_tokens)",
)

VERIFY_OPTIMIZER_STATE = Rule(
    id="verify-optimizer-state",
    why="""
    What the optimizer keeps between steps (moments, momentum) equals that of one device after every
    step: nothing is stale, lost or updated with another gradient.
    """,
    bad="optimizer = AdamW(model.parameters())           # anew in each step",
    fixed="optimizer = AdamW(model.parameters())         # once",
)

VERIFY_SHARDING = Rule(
    id="verify-sharding",
    why="""
    What a configuration asks to be sharded (FSDP, a ZeRO stage) is. Where a framework falls back to
    plain replicas, every number is right, and each rank holds as many times the bytes as there are
    ranks: the run that was to fit does not, or the memory that was measured is another's.
    """,
    bad="Accelerator(cpu=True, fsdp_plugin=plugin)       # trains under DDP, without a word",
    fixed="fully_shard(model)                              # prepare optimizer and data only",
)

VERIFY_PACKAGE = Rule(
    id="verify-package",
    why="""
    A program is run by the Python that runs `echelon`, so its framework has to be installed beside
    Echelon. Frameworks that pin other versions live in an environment of their own:
    `bench/setup_peers.sh` makes one with DeepSpeed, Megatron-core, Accelerate and torchtitan, and
    with what Echelon needs.
    """,
    bad="echelon prove --subject examples/right/deepspeed_zero.py   # without deepspeed",
    fixed=".peers/venv/bin/python -m echelon prove --subject examples/right/deepspeed_zero.py",
)
