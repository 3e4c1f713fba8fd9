"""Bugs in how a pipeline runs its schedule: order, weight gradients, messages, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel import pipeline
from echelon.parallel.data import GradientReduction
from echelon.parallel.pipeline import PipelineExecutor, RankSchedule, StepState
from echelon.schedule.action import ActionKind, Schedule
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.mutants.expert_layouts import BY_SEQUENCE, EP2, EXPERT
from tests.proof.mutants.planting import Told, change_hops, mutant

CHOSEN = (0, 1)
"""The stage and the microbatch at which a bug strikes that does not strike everywhere."""


def _is(action: Any, kind: ActionKind) -> bool:
    return action.kind is kind and (action.stage, action.microbatch) == CHOSEN


def _w_before_its_b(patch: pytest.MonkeyPatch) -> None:
    of = RankSchedule.from_schedule

    def turned_around(schedule: Schedule, pp_rank: int) -> RankSchedule:
        row = of(schedule, pp_rank)
        places = {
            (one.action.stage, one.action.microbatch, one.action.kind): i
            for i, one in enumerate(row.steps)
        }
        if (*CHOSEN, ActionKind.W) not in places:
            return row
        early, late = places[*CHOSEN, ActionKind.B], places[*CHOSEN, ActionKind.W]
        order = [*range(early), late, *(i for i in range(early, len(row.steps)) if i != late)]
        return replace(
            row,
            steps=[row.steps[i] for i in order],
            receives=[row.receives[i] for i in order],
            turns=[row.turns[i] for i in order],
        )

    patch.setattr(RankSchedule, "from_schedule", turned_around)


@mutant()
def w_before_its_b(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run one W before its B."""
    _w_before_its_b(patch)


@mutant(
    Told(
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "microbatches lost",
        "microbatches",
        plan={"pp": 2, "schedule": "zb-h1"},
    ),
)
def w_before_its_b_unseen(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run one W before its B, in an executor that takes what is not there for nothing to do."""
    left = pipeline._take_used

    def nothing(kept: Any, key: Any) -> Any:
        return left(kept, key) if key in kept else []

    def nothing_left(state: StepState) -> list[str]:
        return []

    patch.setattr(pipeline, "_take_used", nothing)
    patch.setattr(StepState, "left_over", nothing_left)
    _w_before_its_b(patch)


@mutant(
    Told(
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "microbatches lost",
        "microbatches",
        plan={"pp": 2, "schedule": "zb-h1"},
    ),
)
def w_dropped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Throw the queue of one W away instead of running it."""
    run_step = PipelineExecutor._run_step

    def dropped(self: Any, state: StepState, step: Any, *rest: Any, **named: Any) -> None:
        if _is(step.action, ActionKind.W):
            del state.weights[CHOSEN]
        else:
            run_step(self, state, step, *rest, **named)

    patch.setattr(PipelineExecutor, "_run_step", dropped)


@mutant()
def w_left_out(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave one W out in the executor as it is."""
    run_step = PipelineExecutor._run_step

    def left_out(self: Any, state: StepState, step: Any, *rest: Any, **named: Any) -> None:
        if not _is(step.action, ActionKind.W):
            run_step(self, state, step, *rest, **named)

    patch.setattr(PipelineExecutor, "_run_step", left_out)


@mutant(
    Told("prove-gradients", "layers.0.mlp.down.weight", "order", "pp", plan={"pp": 2}),
    Told(
        "prove-gradients",
        EXPERT,
        "order",
        "pp",
        plan={"model": replace(MIXTRAL, layers=4), "pp": 2, "balance": BY_SEQUENCE, **EP2},
        of=plan_of,
    ),
)
def gradients_swapped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give the gradients of microbatches 0 and 1 to one another, between stages 0 and 1."""
    give = PipelineExecutor._give
    held: list[Any] = []

    def swapped(self: Any, state: StepState, step: Any, tensor: torch.Tensor | None) -> None:
        action = step.action
        backward = action.kind in (ActionKind.B, ActionKind.BW)
        if not backward or action.stage != 1 or action.microbatch > 1:
            give(self, state, step, tensor)
        elif not held:
            held.append((step, tensor))
        else:
            first, its = held.pop()
            give(self, state, first, tensor)
            give(self, state, step, its)

    patch.setattr(PipelineExecutor, "_give", swapped)


@mutant()
def last_send_skipped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Compute the last microbatch of stage 0, and send it to nobody."""
    give = PipelineExecutor._give
    last = plan.num_microbatches - 1

    def skipped(self: Any, state: StepState, step: Any, tensor: torch.Tensor | None) -> None:
        action = step.action
        if (action.kind, action.stage, action.microbatch) != (ActionKind.F, 0, last):
            give(self, state, step, tensor)

    patch.setattr(PipelineExecutor, "_give", skipped)


@mutant(
    Told("prove-gradients", "embedding.weight", "pp", "pp", plan={"pp": 2, "tied": True}),
)
def tied_gradient_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum the gradient of the tied embedding over both ends of the pipeline a second time."""
    change_hops(patch, lambda kind, hops, groups: [groups.tied] * (kind == "tied") + [*hops])


@mutant(
    Told(
        "prove-gradients",
        "head.weight",
        "missing sum",
        "pp",
        plan={"pp": 2, "schedule": "dualpipe", "accumulation": 4},
    ),
)
def mirror_sum_missing(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the gradients of two copies of a stage apart, where microbatches cross both ways."""
    change_hops(patch, lambda kind, hops, groups: [g for g in hops if g is not groups.mirror])


@mutant(
    Told(
        "prove-gradients",
        "head.weight",
        "pp",
        "pp or microbatches",
        plan={"pp": 2, "schedule": "dualpipe", "accumulation": 4},
    ),
)
def mirror_sum_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum the gradients of two copies of a stage a second time."""
    next_hop = GradientReduction._start_next_sum

    def twice(self: GradientReduction, flight: Any) -> None:
        if flight.next_groups[0] is self._mirror:
            self._mirror.all_reduce(flight.target, name="again").wait()
        next_hop(self, flight)

    patch.setattr(GradientReduction, "_start_next_sum", twice)


def _after_forward(patch: pytest.MonkeyPatch, spoil: Any) -> None:
    forward = PipelineExecutor._forward

    def spoiled(self: Any, state: StepState, action: Any, *rest: Any) -> torch.Tensor | None:
        out = forward(self, state, action, *rest)
        if (action.stage, action.microbatch) == (1, 1):
            spoil(state)
        return out

    patch.setattr(PipelineExecutor, "_forward", spoiled)


@mutant()
def input_freed_early(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let go of a stage's input when its forward pass has ended."""
    _after_forward(patch, lambda state: state.inputs.pop((1, 1)))


@mutant()
def graph_freed_early(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let go of the graph of a stage when its forward pass has ended."""
    _after_forward(patch, lambda state: state.outputs.pop((1, 1)))


@mutant()
def memory_freed_early(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give back the memory of a stage's input when its forward pass has ended."""
    _after_forward(patch, lambda state: state.inputs[1, 1].untyped_storage().resize_(0))


@mutant()
def graph_used_up(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Free what the graph of a stage has saved when its forward pass has ended."""

    def use_up(state: StepState) -> None:
        out = state.outputs[1, 1]
        assert isinstance(out, torch.Tensor), "the last stage gives a loss"
        torch.autograd.grad(out, state.inputs[1, 1])

    _after_forward(patch, use_up)
