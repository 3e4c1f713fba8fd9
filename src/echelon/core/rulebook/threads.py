# SPDX-License-Identifier: Apache-2.0
"""Rules about replicas of a module on threads of one process."""

from echelon.core.rules import Rule

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
