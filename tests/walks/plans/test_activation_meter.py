"""What a meter counts: storages that operators make, from their making to their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from echelon.parallel.pipeline import StepState
from echelon.parallel.rank_model import RankModel
from echelon.schedule.action import Action, ActionKind
from tests.walks.plans.activation_meter import ActivationMeter

FORWARD = Action(kind=ActionKind.F, stage=0, microbatch=0)


class _Executor:
    """Run one action, as the executor of a pipeline would."""

    observer: ActivationMeter | None = None

    def __init__(self, action: Callable[[StepState], object]) -> None:
        self.action = action

    def run(self) -> object:
        state = StepState()
        assert self.observer is not None
        self.observer.action_began(FORWARD, state)
        kept = self.action(state)
        self.observer.action_ended(FORWARD, state)
        return kept


class _Parts:
    """Everything that a meter asks a model for, with nothing in it."""

    balancer = None

    def __init__(self, action: Callable[[StepState], object]) -> None:
        self.executor = _Executor(action)
        self.reduction, self.gathering = _Quiet(), _Quiet()


class _Quiet:
    def make(self, *_: object) -> torch.Tensor:
        """Take memory that is no activation."""
        return torch.zeros(1000)

    before_write = bucket_is_full = enter = leave = enter_backward = leave_backward = make


def measured(action: Callable[[StepState], object]) -> tuple[int, int]:
    """Return what an action left, and the most that was there, in bytes."""
    parts: Any = _Parts(action)
    with ActivationMeter(cast(RankModel, parts)).watching() as meter:
        kept = parts.executor.run()
    del kept
    (noted,) = meter.actions
    assert noted.action == str(FORWARD)
    assert parts.executor.observer is None
    assert "run" not in vars(parts.executor)
    return noted.kept_bytes, noted.peak_bytes


def test_what_is_let_go_counts_for_the_peak_only() -> None:
    def action(_: StepState) -> torch.Tensor:
        first = torch.ones(100)  # 400 bytes
        second = first * 2
        del first
        return second

    assert measured(action) == (400, 800)


def test_views_and_what_is_written_in_place_count_once() -> None:
    assert measured(lambda _: torch.ones(100).view(10, 10).mul_(2)[1:]) == (400, 400)


def test_messages_are_no_activations() -> None:
    def action(state: StepState) -> torch.Tensor:
        made = torch.ones(100)
        state.handed_over[ActionKind.F, 1, 0] = made
        return made

    assert measured(action) == (0, 400)


def test_an_input_of_a_stage_is_one_even_while_it_arrives() -> None:
    def action(state: StepState) -> torch.Tensor:
        made = torch.ones(100)
        state.handed_over[ActionKind.F, 1, 0] = state.inputs[0, 0] = made
        return made

    assert measured(action) == (400, 400)


def test_gathers_and_sums_are_not_counted() -> None:
    parts: Any = _Parts(lambda _: parts.gathering.enter("layers.0"))
    with ActivationMeter(cast(RankModel, parts)).watching() as meter:
        kept = parts.executor.run()
    assert kept.numel() == 1000
    assert (meter.actions[0].kept_bytes, meter.actions[0].peak_bytes) == (0, 0)
    assert "enter" not in vars(parts.gathering)
