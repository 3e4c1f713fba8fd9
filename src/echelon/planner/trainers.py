"""What other trainers can be told and can run: a search for one of them keeps to it.

One table for each tool of `planner/export/`. What an exporter refuses is left out here
(`tests/planner/test_trainers.py` exports every plan of a search), and what its documentation rules
out although there are words for it:

    Megatron-LM   core 0.16: pipeline_parallel/schedules.py (1f1b, interleaved with a multiple of
                  pp microbatches), training/arguments.py (recompute; experts over tensor ranks need
                  sequence parallelism)
    DeepSpeed     0.19: docs/pipeline (1f1b, ZeRO 0 and 1), AutoTP (ZeRO 0 to 2), ALST (Ulysses)
    torchtitan    0.2.2: distributed/pipeline_parallel.py (its schedules), FSDP 2 over all data and
                  context ranks, tensor ranks with sequence parallelism
    Accelerate    1.15: FSDP 2 (ZeRO 3) with tensor and context ranks, neither pipelines nor expert
                  ranks; what DDP and DeepSpeed's plugin add up in other dtypes is left aside
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echelon.config.foreign.importer import Kind
from echelon.config.foreign.torchtitan_keys import SCHEDULES as TITAN_SCHEDULES
from echelon.planner.pins import NO_RECOMPUTE

if TYPE_CHECKING:
    from echelon.planner.choices import Order, Shares

EVERY_BLOCK = 1
SHARED, SUMMED, WHOLE = 1, 2, 3
"""ZeRO's stages: what is shared out of an optimizer, of gradients, of parameters."""

Values = tuple[int | str, ...]


def _any_shares(shares: Shares, pipeline: bool, tensor: bool, context: bool) -> bool:
    return True


def _any_order(order: Order, ranks: int, microbatches: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Say what a tool can run: values by the name of a pin, and what goes with what.

    `streams` says whether tensor ranks cut norms and residuals too, None where either may be.
    `shares` is asked of a way to share out, with whether there are pipeline, tensor and context
    ranks; `order` of a schedule on so many ranks with so many microbatches. `numbers` are settings
    of its own where nobody says any; its sums of gradients have the dtype of parameters where
    `narrow_sums`.
    """

    tool: Kind
    values: Mapping[str, Values] = field(default_factory=dict[str, Values])
    streams: bool | None = None
    streams_of_experts: bool | None = None
    shares: Callable[[Shares, bool, bool, bool], bool] = _any_shares
    order: Callable[[Order, int, int], bool] = _any_order
    numbers: Mapping[str, object] = field(default_factory=dict[str, object])
    narrow_sums: bool = False

    def limits(self, *, experts: bool) -> dict[str, Values]:
        """Return what a pin may be, for a model with experts or without."""
        streams = self.streams_of_experts if experts else self.streams
        found = dict(self.values)
        return found if streams is None else found | {"split_streams": (int(streams),)}


def _rounds(order: Order, ranks: int, microbatches: int) -> bool:
    return order.name != "interleaved-1f1b" or microbatches % ranks == 0


def _of_deepspeed(shares: Shares, pipeline: bool, tensor: bool, context: bool) -> bool:
    whole = shares.dp_replicate == 1 or shares.zero in (0, WHOLE)
    most = SHARED if pipeline else SUMMED if tensor else WHOLE
    return whole and shares.zero <= most


def _of_torchtitan(shares: Shares, pipeline: bool, tensor: bool, context: bool) -> bool:
    alone = shares.dp_shard == 1 and not context
    return shares.zero == (0 if alone else WHOLE)


FULL_OR_NONE: Values = (NO_RECOMPUTE, EVERY_BLOCK)

MEGATRON = Abilities(
    tool="megatron",
    values={
        "schedule": ("1f1b", "interleaved-1f1b"),
        "context": ("ring", "gathered", "ulysses", "ulysses-ring"),
        "recompute": FULL_OR_NONE,
    },
    streams_of_experts=True,
    order=_rounds,
)
DEEPSPEED = Abilities(
    tool="deepspeed",
    values={"schedule": ("1f1b",), "virtual": (1,), "context": ("ulysses",)},
    streams=False,
    streams_of_experts=False,
    shares=_of_deepspeed,
)
TORCHTITAN = Abilities(
    tool="torchtitan",
    values={
        "schedule": tuple(dict.fromkeys(TITAN_SCHEDULES.values())),
        "context": ("ring", "gathered"),
        "offload": (0,),
    },
    streams=True,
    streams_of_experts=True,
    shares=_of_torchtitan,
    numbers={"optimizer.decay": "all"},
)
ACCELERATE = Abilities(
    tool="accelerate",
    values={
        "pp": (1,),
        "ep": (1,),
        "expert_tp": (1,),
        "context": ("ring", "gathered"),
        "recompute": FULL_OR_NONE,
        "zero": (WHOLE,),
        "offload": (0,),
    },
    streams=False,
    streams_of_experts=False,
    narrow_sums=True,
)

ABILITIES: Mapping[str, Abilities] = {
    "megatron": MEGATRON,
    "megatron-core": MEGATRON,
    "megatron-core-2025": MEGATRON,
    "megatron-core-2026": MEGATRON,
    "megatron-deepspeed": DEEPSPEED,
    "deepspeed": DEEPSPEED,
    "deepspeed-2022": DEEPSPEED,
    "fsdp": ACCELERATE,
    "fsdp-compiled": ACCELERATE,
    "fsdp2": TORCHTITAN,
    "fsdp2-compiled": TORCHTITAN,
}
"""By generation of trainer; what is not here can be told everything."""

ALSO_CALLED = {
    "torchtitan": "fsdp2",
    "accelerate": "fsdp",
    "megatron-lm": "megatron-core-2025",
    # Who names no year does not mean the one whose gathers went parameter by parameter.
    "deepspeed": "deepspeed-2022",
    "deepspeed-2021": "deepspeed",
}
"""Tools by the generation whose seconds are theirs."""
