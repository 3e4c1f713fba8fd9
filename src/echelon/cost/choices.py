"""What a plan decided about ZeRO, beside what it did not choose: bytes sent against bytes held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.plan import Accumulation, Plan, Zero
from echelon.cost.buckets import plan_buckets
from echelon.cost.bytes_held import held_buckets, held_terms
from echelon.cost.data_bytes import data_bytes
from echelon.cost.stage import rank_part
from echelon.cost.transient import held_at_most

ACCUMULATIONS: tuple[Accumulation, ...] = ("whole", "slices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Say what one value of a setting costs each rank of a pipeline rank.

    `sent_bytes` go over the data axes per step; `held_bytes` rest on the device between steps, and
    at most `step_bytes` come on top while one runs.
    """

    setting: str
    value: str
    chosen: bool
    sent_bytes: int
    held_bytes: int
    step_bytes: int


def zero_choices(plan: Plan, pp_rank: int) -> tuple[Choice, ...]:
    """Return the values of each setting that trades bytes sent for bytes held, the chosen one too.

    Where gradients add up (ZeRO stages 1 to 3), and whether parameters are freed between forward
    and backward (stage 3).
    """
    return tuple(_choices(plan, pp_rank)) if plan.layout.zero.stage else ()


def _choices(plan: Plan, pp_rank: int) -> Iterator[Choice]:
    zero = plan.layout.zero
    for accumulate in ACCUMULATIONS:
        other = replace(zero, accumulate=accumulate)
        yield _choice(plan, pp_rank, other, "zero.accumulate", accumulate)
    if zero.stage == 3:
        for word, reshard in (("always", True), ("never", False)):
            other = replace(zero, reshard_after_forward=reshard)
            yield _choice(plan, pp_rank, other, "zero.reshard_after_forward", word)


def _choice(plan: Plan, pp_rank: int, zero: Zero, setting: str, value: str) -> Choice:
    other = replace(plan, layout=replace(plan.layout, zero=zero))
    rank = plan.mesh.rank({Axis.PP: pp_rank})
    held = held_terms(other, held_buckets(other, pp_rank), rank)
    step = held_at_most(other, pp_rank)
    return Choice(
        setting=setting,
        value=value,
        chosen=zero == plan.layout.zero,
        sent_bytes=_data_bytes(other, pp_rank),
        held_bytes=sum(term.bytes for term in held if term.pool == "device"),
        step_bytes=sum(term.bytes for term in step if term.pool == "device"),
    )


def _data_bytes(plan: Plan, pp_rank: int) -> int:
    if plan.mesh.degree(*LOSS_AXES) == 1:
        return 0
    part = rank_part(plan, pp_rank)
    return sum(term.bytes for term in data_bytes(plan, part, plan_buckets(plan, part)))
