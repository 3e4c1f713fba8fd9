"""How many data-parallel ranks an imported run has, and how its batch is shared out over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from echelon.config.foreign.ledger import COUNT, Ledger
from echelon.config.foreign.surroundings import Surroundings
from echelon.core.rulebook.batch import BATCH_DIVIDES
from echelon.core.rulebook.imports import IMPORT_RANKS
from echelon.core.rules import nearest_divisors


def data_ranks_of(ledger: Ledger, ranks: int, around: Surroundings, source: str) -> int | None:
    """Return how many of `ranks` read different samples, or None where they do not divide."""
    data, rest = divmod(ranks, around.model_ranks)
    if rest == 0:
        return data
    degrees = " x ".join(f"{axis} {around.degrees[axis]}" for axis in ("tp", "pp", "cp"))
    below = ranks - rest
    ledger.problems.append(
        IMPORT_RANKS.problem(
            f"{ranks} ranks cannot be shared out: {degrees} = {around.model_ranks} ranks hold one "
            f"model ({ranks} % {around.model_ranks} = {rest})",
            key="mesh",
            set_by=source,
            works=[n for n in (below, below + around.model_ranks) if n > 0],
        )
    )
    return None


def launched_ranks(ledger: Ledger, around: Surroundings) -> DataRanks | None:
    """Return the data ranks where the file does not tell them; None where they do not divide."""
    if around.ranks is not None:
        source = f"--ranks {around.ranks}"
        data = data_ranks_of(ledger, around.ranks, around, source)
        if data is None:
            return None
        why = f"{around.ranks} ranks / {around.model_ranks} that hold one model"
        return DataRanks(count=data, why=why, source=source)
    if around.data_ranks > 1:
        source = "the mesh that it builds on"
        return DataRanks(count=around.data_ranks, why=source, source=source)
    data = max(1, around.devices // around.model_ranks)
    why = f"the launcher takes all devices: {around.cluster} has {around.devices}"
    return DataRanks(count=data, why=why, source=f"cluster {around.cluster}")


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


def shards_of_experts(around: Surroundings) -> int:
    """Return how many data ranks may be no copies of each other: they share out the experts."""
    degrees = around.degrees
    ep, pieces = degrees.get("ep", 1), degrees.get("expert_tp", 1)
    inner = degrees["cp"] * (degrees["tp"] if pieces == 1 else 1)
    return ep // gcd(ep, inner)


def set_data_mesh(ledger: Ledger, stage: int, data: DataRanks) -> None:
    """Map the data ranks to the mesh."""
    shard = data.count // data.groups if stage else gcd(data.count, data.shards)
    for axis, degree in (("dp_replicate", data.count // shard), ("dp_shard", shard)):
        ledger.set(data.key, f"mesh.{axis}", degree, data.why, source=data.source)


def set_batch(
    ledger: Ledger, keys: Sequence[str], values: Sequence[int | None], data: int, microbatch: int
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
            ledger.set(micro_key, micro_setting, micro, "sequences of one forward pass of a rank")
        why = f"microbatch x accumulation x data ranks = {size} x {count} x {data}"
        source = ledger.where(*(k for k in (micro_key, steps_key) if ledger.has(k)))
        ledger.set(batch_key, total_setting, size * count * data, why, source=source)
        return
    ledger.set(batch_key, total_setting, total, "sequences of one optimizer step")
    if micro is not None:
        ledger.set(micro_key, micro_setting, micro, "sequences of one forward pass of a rank")
        return
    size, rest = divmod(total, (steps or 1) * data)
    if rest or not size:
        ledger.problems.append(
            BATCH_DIVIDES.problem(
                f"{batch_key} = {total} is not a multiple of accumulation x data ranks = "
                f"{steps or 1} x {data} ({total} % {(steps or 1) * data} = {rest})",
                key=total_setting,
                set_by=ledger.where(batch_key, *([steps_key] if steps else [])),
                works=[
                    f"{n} data ranks" for n in nearest_divisors(total // (steps or 1) or 1, data)
                ],
            )
        )
        return
    why = f"batch / (accumulation x data ranks) = {total} / ({steps or 1} x {data})"
    ledger.set(micro_key, micro_setting, size, why, source=ledger.where(batch_key))


def read_count(ledger: Ledger, key: str, setting: str, open_why: str) -> int | None:
    """Return a count, or None where it is absent, wrong, or "auto" (which is said)."""
    if ledger.is_auto(key):
        ledger.skip(key, open_why)
        return None
    return ledger.whole(key, COUNT, setting=setting)
