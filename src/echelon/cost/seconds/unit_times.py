# SPDX-License-Identifier: Apache-2.0
"""Seconds of each unit of a model for one microbatch on one rank.

A *unit* is what `layout/buckets.py` names: "embedding", one block ("layers.3"), or "head" (the last
norm, the logits and the loss). Stages are cut, schedules searched and drawn, and steps timed event
by event by these seconds: those of `block.py` for a plan, or measured ones of the
same type (`config/files/measurements.py`), which have what ranks send to one another from here.

A block that is recomputed has its forward pass once more in B, with selective recompute the
operators that are chosen. Of the embedding a half is its lookup, the other half the gradient of its
rows, in W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan, RecomputedOperator
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.block import BlockSeconds
from echelon.cost.seconds.from_plan import cost_inputs_from_plan, mean_keys_per_query
from echelon.cost.seconds.step import BlockKindSeconds, block_kind_seconds, message_between_stages
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.schedule.simulate import Durations

Again: TypeAlias = 'Literal["everything"] | frozenset[RecomputedOperator]'
"""What of a block's forward pass runs once more in B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Give the seconds of each unit of a model for one microbatch on one rank.

    `backward_s` is the whole backward pass at once (BW), where that is not the sum of its halves.
    `transfer_s` is one message between neighbour stages, of `message_bytes`. `where` names the
    file of measured times.
    """

    source: Literal["modelled", "measured"]
    forward_s: Mapping[str, float]
    input_gradient_s: Mapping[str, float]
    weight_gradient_s: Mapping[str, float]
    backward_s: Mapping[str, float] | None = None
    transfer_s: float = 0.0
    message_bytes: int = 0
    where: str = ""

    def total_s(self, unit: str) -> float:
        """Return the seconds of a unit: forward and backward."""
        if self.backward_s is not None:
            return self.forward_s[unit] + self.backward_s[unit]
        return self.forward_s[unit] + (self.input_gradient_s[unit] + self.weight_gradient_s[unit])

    @property
    def whole_backward_s(self) -> Mapping[str, float]:
        """Return the seconds of BW of each unit."""
        if self.backward_s is not None:
            return self.backward_s
        weights = self.weight_gradient_s
        return {unit: s + weights[unit] for unit, s in self.input_gradient_s.items()}


def unit_times_from_formulas(plan: Plan) -> UnitTimes:
    """Return the times of each unit of a plan by the formulas, for our trainer."""
    work = cost_inputs_from_plan(plan)
    return with_transfer(plan, unit_times_by_kind(plan.model, block_kinds(plan), work), work)


def unit_times_by_kind(
    shape: ModelShape,
    kinds: Sequence[tuple[bool, Again]],
    work: CostInputs,
    seconds: Callable[[CostInputs], BlockKindSeconds] = block_kind_seconds,
) -> UnitTimes:
    """Return the times of units whose blocks have experts, run again, and attend each in its way.

    A query of a local block meets fewer keys than one of a global block.
    """
    firsts = shape.first_of_kinds
    if len(firsts) == 1:
        return unit_times_from_blocks(seconds(work), kinds)
    length = int(first_number(work.model.length))
    found = {
        shape.layer_kind(first): unit_times_from_blocks(
            seconds(
                replace(
                    work,
                    model=replace(
                        work.model,
                        keys_per_query=mean_keys_per_query(shape.of_layer(first), length),
                    ),
                )
            ),
            kinds,
        )
        for first in firsts
    }
    base = found[shape.layer_kind(0)]
    of_layers = {f"layers.{i}": found[shape.layer_kind(i)] for i in range(shape.layers)}
    return replace(
        base,
        forward_s={u: of_layers.get(u, base).forward_s[u] for u in base.forward_s},
        input_gradient_s={u: of_layers.get(u, base).input_gradient_s[u] for u in base.forward_s},
        weight_gradient_s={u: of_layers.get(u, base).weight_gradient_s[u] for u in base.forward_s},
    )


def block_kinds(plan: Plan) -> tuple[tuple[bool, Again], ...]:
    """Return of each block whether it has experts, and what of it runs again."""
    recompute = plan.layout.recompute
    return tuple(
        (
            plan.model.layer_has_experts(layer),
            "everything" if recompute.recomputes(layer) else recompute.operators_of(layer),
        )
        for layer in range(plan.model.layers)
    )


def unit_times_from_blocks(
    blocks: BlockKindSeconds, kinds: Sequence[tuple[bool, Again]]
) -> UnitTimes:
    """Return the times of units whose blocks are of these kinds; messages are free."""
    forward: dict[str, float] = {}
    inputs: dict[str, float] = {}
    weights: dict[str, float] = {}
    known = {kind: _passes(blocks.experts if kind[0] else blocks.dense, kind[1]) for kind in kinds}
    for layer, kind in enumerate(kinds):
        unit = f"layers.{layer}"
        forward[unit], inputs[unit], weights[unit] = known[kind]
    ends = blocks.ends
    looked_up = first_number(ends.embedding)
    forward[UNIT_EMBEDDING] = weights[UNIT_EMBEDDING] = looked_up / 2
    inputs[UNIT_EMBEDDING] = 0.0
    forward[UNIT_HEAD] = first_number(ends.head_forward)
    inputs[UNIT_HEAD] = first_number(ends.head_input_gradient)
    weights[UNIT_HEAD] = first_number(ends.head_weight_gradient)
    return UnitTimes(
        source="modelled", forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights
    )


def _passes(block: BlockSeconds, again: Again) -> tuple[float, float, float]:
    first, back = first_number(block.forward.total), first_number(block.input_gradients.total)
    more = first if again == "everything" else block.again.of_operators(again)
    return first, back + more, first_number(block.weight_gradients)


def with_transfer(plan: Plan, times: UnitTimes, work: CostInputs | None = None) -> UnitTimes:
    """Return `times` with the seconds of one message between neighbour stages."""
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    split = plan.mesh.tp if plan.layout.sequence_parallel else 1
    message = plan.local_tokens * plan.model.hidden * size // split
    seconds = (
        first_number(message_between_stages(work or cost_inputs_from_plan(plan)))
        if plan.mesh.pp > 1
        else 0.0
    )
    return replace(times, transfer_s=seconds, message_bytes=message)


def with_recompute(plan: Plan, times: UnitTimes) -> UnitTimes:
    """Return `times` where B of every block that the plan recomputes has its forward in it."""
    recompute, again = plan.layout.recompute, dict.fromkeys(times.forward_s, 0.0)
    for layer in range(plan.model.layers):
        if recompute.recomputes(layer):
            again[f"layers.{layer}"] = times.forward_s[f"layers.{layer}"]
    inputs = {unit: s + again[unit] for unit, s in times.input_gradient_s.items()}
    if times.backward_s is None:
        return replace(times, input_gradient_s=inputs)
    whole = {unit: s + again[unit] for unit, s in times.backward_s.items()}
    return replace(times, input_gradient_s=inputs, backward_s=whole)


def stage_durations(plan: Plan, times: UnitTimes) -> Durations:
    """Return the seconds of F, B, W and BW of each stage of `plan`, and of the transfers."""
    return durations_from_stages(plan.layout.pipeline.stages, times)


def durations_from_stages(stages: Sequence[Sequence[int]], times: UnitTimes) -> Durations:
    """Return the seconds of stages that hold these blocks; the ends hold embedding and head."""
    forward, inputs, weights, backward = (
        tuple(_sum(stages, stage, by_unit) for stage in range(len(stages)))
        for by_unit in (
            times.forward_s,
            times.input_gradient_s,
            times.weight_gradient_s,
            times.whole_backward_s,
        )
    )
    return Durations(
        forward_s=forward,
        backward_s=backward,
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        transfer_s=(times.transfer_s,) * (len(stages) - 1),
        message_bytes=times.message_bytes,
    )


def stage_seconds(stages: Sequence[Sequence[int]], times: UnitTimes) -> tuple[float, ...]:
    """Return the seconds of each stage for one microbatch: forward and backward."""
    durations = durations_from_stages(stages, times)
    return tuple(f + b for f, b in zip(durations.forward_s, durations.backward_s, strict=True))


def memory_bound_seconds(plan: Plan) -> tuple[float, ...]:
    """Return for each stage the seconds of a microbatch in which memory alone sets the pace.

    Norms, rotations, activations and residuals do a few FLOPs for each byte that they move, far
    fewer than the ridge of the roofline (Williams, Waterman and Patterson, "Roofline", 2009), which
    is the device's FLOP/s over its bytes per second: they last as long as their bytes need. A
    matrix product counts as compute.
    """
    blocks = block_kind_seconds(cost_inputs_from_plan(plan))
    kinds = block_kinds(plan)

    def of(layer: int) -> float:
        experts, again = kinds[layer]
        block = blocks.experts if experts else blocks.dense
        forward = first_number(block.forward.memory_bound)
        backward = first_number(block.input_gradients.memory_bound)
        return (2.0 if again == "everything" else 1.0) * forward + backward

    stages = plan.layout.pipeline.stages
    return tuple(sum(of(layer) for layer in stage) for stage in stages)


def _sum(stages: Sequence[Sequence[int]], stage: int, by_unit: Mapping[str, float]) -> float:
    seconds = sum(by_unit[f"layers.{layer}"] for layer in stages[stage])
    seconds += by_unit[UNIT_EMBEDDING] * (stage == 0)
    return seconds + by_unit[UNIT_HEAD] * (stage == len(stages) - 1)
