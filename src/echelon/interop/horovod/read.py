# SPDX-License-Identifier: Apache-2.0
"""A horovodrun command -> settings: ranks, batch, sums of gradients, the optimizer. Horovod 0.28.

Horovod averages the gradients of whole replicas; what else a run is, its script says. Of scripts
the flags are read that those of its examples have (`examples/pytorch`), with what they mean there:
the learning rate is multiplied by the ranks and the passes before each sum.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.ranks import (
    DataRanks,
    assume_fewest_ranks,
    data_ranks_from_launcher,
    set_batch,
    set_data_mesh,
)
from echelon.interop.tool_tables import tool_tables

TABLES = tool_tables("horovod")
RANKS, BATCH, PASSES = "--num-proc", "--batch-size", "--batches-per-allreduce"
HALF = "--fp16-allreduce"
FUSION, FUSION_BYTES = "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD"
HIERARCHY, NO_HIERARCHY = "--hierarchical-allreduce", "--no-hierarchical-allreduce"
HIERARCHY_VARIABLE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
MEBIBYTE = 2**20  # bytes
LARGEST_MB = 2**20  # mebibytes


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every flag and variable of a horovodrun command."""
    ranks = _read_ranks(reader, context)
    passes = _read_batch(reader, ranks, context)
    _read_sums(reader, ranks)
    _read_optimizer(reader, ranks * passes)
    reader.take("--seed", "train.seed", FROM_ZERO, "of the first weights and the sample order")
    reader.take("--log-interval", "observe.log_every", COUNT, "steps between step lines")
    reader.judge(TABLES.keys["launcher"])
    reader.judge(TABLES.keys["script"])
    reader.finish()


def _read_ranks(reader: KeyReader, context: ImportContext) -> int:
    """Map how many processes there are, each a whole replica; return them."""
    count = reader.integer(RANKS, COUNT, setting="mesh")
    reader.set("(processes)", "zero.stage", 0, "whole replicas", source=reader.default)
    source = ""
    if count is not None:
        if context.ranks not in (None, count):
            both = f"{reader.where(RANKS)}, --ranks {context.ranks}"
            reader.conflict(f"{RANKS} {count}, but --ranks {context.ranks}", "mesh", both)
            return 1
        source = reader.where(RANKS)
        reader.take_part(RANKS, f"ranks: {count}")
        context = replace(context, ranks=count)
    data: DataRanks | None
    if context.ranks_unknown:
        data = assume_fewest_ranks(reader, context)
    else:
        data = data_ranks_from_launcher(reader, context)
    if data is None:
        return 1
    set_data_mesh(reader, 0, replace(data, source=source or data.source))
    return data.count


def _read_batch(reader: KeyReader, ranks: int, context: ImportContext) -> int:
    """Map what a process reads between two sums; return its backward passes."""
    size = reader.integer(BATCH, COUNT, setting="batch.microbatch_sequences")
    passes = reader.integer(PASSES, COUNT, setting="batch.global_sequences")
    keys = ("(batch)", BATCH, PASSES)
    set_batch(reader, keys, (None, size, passes), ranks, context.microbatch)
    if passes is not None:
        reader.take_part(
            PASSES, "backward passes of a rank before each sum: the global batch has them"
        )
    return passes or 1


def _read_sums(reader: KeyReader, ranks: int) -> None:
    """Map how gradients are summed: in which dtype, in which buckets, over which ways."""
    if reader.flag(HALF, setting="precision.reduction"):
        reader.set(HALF, "precision.reduction", "fp16", "dtype on the wire, and of the sums")
        why = "sums in fp16 need a loss scale, or small gradients are zero"
        reader.set(HALF, "precision.loss_scaling", "dynamic", why)
    elif reader.has(HALF):
        reader.skip(HALF, "gradients are summed in their own dtype")
    _read_buckets(reader, ranks)
    on = bool(reader.flag(HIERARCHY, setting="collectives.algorithm"))
    off = bool(reader.flag(NO_HIERARCHY, setting="collectives.algorithm"))
    if on and off:
        both = reader.where(HIERARCHY, NO_HIERARCHY)
        reader.conflict(f"{HIERARCHY} and {NO_HIERARCHY}", "collectives.algorithm", both)
        return
    variable = reader.integer(HIERARCHY_VARIABLE, setting="collectives.algorithm")
    key = HIERARCHY if on else NO_HIERARCHY if off else HIERARCHY_VARIABLE
    if not (on or off) and variable is None:
        return
    hierarchical = on or (not off and bool(variable))
    what = "inside of nodes, across them, inside again" if hierarchical else "the backend's own"
    reader.set(key, "collectives.algorithm", HIERARCHICAL if hierarchical else BACKEND, what)
    if key != HIERARCHY_VARIABLE:
        reader.skip(HIERARCHY_VARIABLE, f"{key} says it")


def _read_buckets(reader: KeyReader, ranks: int) -> None:
    """Map what is summed together; a threshold of 0 sums each parameter by itself."""
    megabytes = reader.integer(FUSION, setting="zero.bucket_bytes")
    size = reader.integer(FUSION_BYTES, setting="zero.bucket_bytes")
    key = FUSION if megabytes is not None else FUSION_BYTES
    if megabytes is not None and megabytes > LARGEST_MB:
        reader.refuse(FUSION, "more than any device has", setting="zero.bucket_bytes")
        return
    total = megabytes * MEBIBYTE if megabytes is not None else size
    if total is None:
        return
    if ranks == 1:
        reader.skip_all((FUSION, FUSION_BYTES), "one rank sums nothing")
        return
    why = "gradients that are summed together" if total else "each parameter is a bucket"
    reader.set(key, "zero.bucket_bytes", max(1, total), why)
    if key != FUSION_BYTES:
        reader.skip(FUSION_BYTES, f"{key} says it")


def _read_optimizer(reader: KeyReader, factor: int) -> None:
    """Map the optimizer of the examples, SGD with the rate that they multiply."""
    keys = ("--base-lr", "--lr")
    rates = [(key, reader.number(key, POSITIVE, setting="optimizer.learning_rate")) for key in keys]
    for key, rate in rates:
        if rate is not None:
            why = f"the examples multiply it by ranks x passes = {factor}"
            reader.set(key, "optimizer.learning_rate", rate * factor, why)
    momentum = reader.number("--momentum", NUMBER, setting="optimizer.momentum")
    if momentum is not None:
        reader.set("--momentum", "optimizer.kind", "sgd", "the examples' optimizer")
        reader.set("--momentum", "optimizer.momentum", momentum, "decay of the momentum")
        reader.set("--momentum", "optimizer.clip_norm", "none", "the examples clip nothing")
    decay = reader.number("--wd", NUMBER, setting="optimizer.weight_decay")
    if decay is not None:
        reader.set("--wd", "optimizer.weight_decay", decay, "added to gradients, as SGD has it")
        reader.set("--wd", "optimizer.decay", "all", "torch.optim.SGD decays every parameter")
