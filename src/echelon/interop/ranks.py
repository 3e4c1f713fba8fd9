# SPDX-License-Identifier: Apache-2.0
"""What files of all tools say alike: mesh, data ranks, how a batch is shared out, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from echelon.core.rulebook.interop import IMPORT_RANKS
from echelon.core.rulebook.mesh import BATCH_DIVIDES
from echelon.core.rules import nearest_divisors
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, KeyReader

DEGREES = {"tp": "pieces of a matrix", "pp": "pipeline stages", "cp": "pieces of a sequence"}
"""The axes of one model, and what a degree counts."""


def read_degrees(reader: KeyReader, keys: Mapping[str, str]) -> dict[str, int]:
    """Map the degrees of the axes of one model, by a key for each; 1 where there is none."""
    return {
        axis: reader.take(key, f"mesh.{axis}", COUNT, DEGREES[axis]) or 1
        for axis, key in keys.items()
    }


def read_expert_degrees(
    reader: KeyReader, ep_key: str, expert_tp_key: str, context: ImportContext
) -> ImportContext:
    """Map over how many ranks experts are shared out, and cut; return the context with both."""
    ep = reader.take(ep_key, "mesh.ep", COUNT, "shares of the experts")
    expert_tp = reader.take(expert_tp_key, "experts.expert_tp", COUNT, "pieces of an expert")
    return context.with_degrees(ep=ep or 1, expert_tp=expert_tp or 1)


def _count_data_ranks(
    reader: KeyReader, ranks: int, context: ImportContext, source: str
) -> int | None:
    """Return how many of `ranks` read different samples, or None where they do not divide."""
    data, rest = divmod(ranks, context.model_ranks)
    if rest == 0:
        return data
    degrees = " x ".join(f"{axis} {context.degrees[axis]}" for axis in ("tp", "pp", "cp"))
    below = ranks - rest
    message = (
        f"{ranks} ranks cannot be shared out: {degrees} = {context.model_ranks} ranks hold one "
        f"model ({ranks} % {context.model_ranks} = {rest})"
    )
    counts = [n for n in (below, below + context.model_ranks) if n > 0]
    reader.note(IMPORT_RANKS, message, "mesh", source, counts)
    return None


def data_ranks_from_launcher(reader: KeyReader, context: ImportContext) -> DataRanks | None:
    """Return the data ranks where the file does not tell them; None where they do not divide."""
    if context.ranks is not None:
        source = f"--ranks {context.ranks}"
        data = _count_data_ranks(reader, context.ranks, context, source)
        if data is None:
            return None
        why = f"{context.ranks} ranks / {context.model_ranks} that hold one model"
        return DataRanks(count=data, why=why, source=source)
    if context.data_ranks > 1:
        source = "the mesh that it builds on"
        return DataRanks(count=context.data_ranks, why=source, source=source)
    data = max(1, context.devices // context.model_ranks)
    why = f"the launcher takes all devices: {context.cluster} has {context.devices}"
    if not context.cluster_named:
        reader.assume(f"{data * context.model_ranks} ranks: {why}; --ranks N says how many")
    return DataRanks(count=data, why=why, source=f"cluster {context.cluster}")


def known_or_fewest_ranks(reader: KeyReader, context: ImportContext) -> DataRanks | None:
    """Return the data ranks by what is known of the launch, or else as few as can be."""
    if context.ranks_unknown:
        return assume_fewest_ranks(reader, context)
    return data_ranks_from_launcher(reader, context)


def assume_fewest_ranks(reader: KeyReader, context: ImportContext, copies: int = 1) -> DataRanks:
    """Return the data ranks where nothing says how many ranks are started: as few as can be."""
    count = copies * shards_of_experts(context)
    ranks = context.model_ranks * count
    reader.assume(
        f"{ranks} ranks, the fewest that hold the model: nothing says how many are started; "
        "--ranks N or --launcher LINE does"
    )
    source = f"assumed: {ranks} ranks"
    return DataRanks(count=count, why="the fewest that hold the model", source=source)


def set_offload(reader: KeyReader, key: str, on: bool | None, why: str) -> None:
    """Map a key that moves parameters to the host, and the optimizer that updates them there."""
    if on is not None:
        for what in ("parameter", "optimizer"):
            reader.set(key, f"zero.{what}_offload", "host" if on else "none", why)


def blocks_of_stages(sizes: Iterable[int]) -> list[list[int]]:
    """Return the blocks of each stage, from how many it has."""
    return [list(range(*ends)) for ends in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """Say how many ranks read different samples, why so many, and who says so.

    Of `groups` copies of what is shared out each has an equal part of them; where nothing is, at
    least `shards` of them share out experts. `key` is that of the file which counts them, if there
    is one.
    """

    count: int
    why: str
    source: str
    groups: int = 1
    shards: int = 1
    key: str = "(processes)"


def shards_of_experts(context: ImportContext) -> int:
    """Return how many data ranks may be no copies of each other: they share out the experts."""
    degrees = context.degrees
    ep, expert_tp = degrees.get("ep", 1), degrees.get("expert_tp", 1)
    inner = degrees["cp"] * (degrees["tp"] if expert_tp == 1 else 1)
    return ep // gcd(ep, inner)


def set_data_mesh(reader: KeyReader, stage: int, data: DataRanks) -> None:
    """Map the data ranks to the mesh."""
    shard = data.count // data.groups if stage else gcd(data.count, data.shards)
    for axis, degree in (("dp_replicate", data.count // shard), ("dp_shard", shard)):
        reader.set(data.key, f"mesh.{axis}", degree, data.why, source=data.source)


def set_batch(
    reader: KeyReader, keys: Sequence[str], values: Sequence[int | None], data: int, microbatch: int
) -> None:
    """Map the size of a batch; the keys (values) are those of batch, microbatch, accumulation.

    Of three values the third follows. A single one means that there is no accumulation. Where all
    are left open, what the run builds on holds.
    """
    batch_key, micro_key, steps_key = keys
    total, micro, steps = values
    micro_setting, total_setting = "batch.microbatch_sequences", "batch.global_sequences"
    if total is None and micro is None and steps is None:
        return
    if total is None:
        size, count = micro or microbatch, steps or 1
        if micro is not None:
            what = "sequences of one forward pass of a rank"
            reader.set_or_default(micro_key, micro_setting, micro, what)
        why = f"microbatch x accumulation x data ranks = {size} x {count} x {data}"
        named = [key for key in (micro_key, steps_key) if reader.has(key)]
        source = reader.where(*named) if named else reader.default
        reader.set(batch_key, total_setting, size * count * data, why, source=source)
        return
    reader.set(batch_key, total_setting, total, "sequences of one optimizer step")
    if micro is not None:
        reader.set(micro_key, micro_setting, micro, "sequences of one forward pass of a rank")
        return
    count = steps or 1
    size, rest = divmod(total, count * data)
    if rest or not size:
        message = (
            f"{batch_key} = {total} is not a multiple of accumulation x data ranks = "
            f"{count} x {data} ({total} % {count * data} = {rest})"
        )
        where = reader.where(batch_key, *([steps_key] if steps else []))
        works = [f"{n} data ranks" for n in nearest_divisors(total // count or 1, data)]
        reader.note(BATCH_DIVIDES, message, total_setting, where, works)
        return
    why = f"batch / (accumulation x data ranks) = {total} / ({count} x {data})"
    reader.set(micro_key, micro_setting, size, why, source=reader.where(batch_key))


def read_count(reader: KeyReader, key: str, setting: str, open_why: str) -> int | None:
    """Return a count, or None where it is absent, wrong, or "auto" (which is said)."""
    if reader.is_auto(key):
        reader.skip(key, open_why)
        return None
    return reader.integer(key, COUNT, setting=setting)


def set_sequence_parallel(reader: KeyReader, key: str, on: bool, tp: int) -> None:
    """Map a key that says whether tensor ranks, if there are several, cut norms and residuals."""
    if on and tp > 1:
        reader.set(key, "mesh.sequence_parallel", True, "norms and residuals are cut too")
    else:
        reader.skip(key, "norms and residuals are whole")


HOST_OR_NONE: Mapping[bool, object] = {True: "host", False: "none"}
FULL_OR_NONE: Mapping[bool, object] = {True: "full", False: "none"}
ALWAYS_OR_NEVER: Mapping[bool, object] = {True: "always", False: "never"}
"""What flags of offload, of recompute and of units that are gathered again are here."""

ROLES = (
    ("parameters", "in forward and backward"),
    ("gradients", "as they accumulate"),
    ("reduction", "as they are summed over ranks"),
    ("master", "what the optimizer updates"),
)
"""The roles of a dtype, as the table `precision` has them, and when each counts."""


def set_dtypes(reader: KeyReader, key: str, *dtypes: str) -> None:
    """Map a key, or its default, to the dtypes of parameters, gradients, reduction and master."""
    for (role, why), dtype in zip(ROLES, dtypes, strict=True):
        reader.set_or_default(key, f"precision.{role}", dtype, why)
