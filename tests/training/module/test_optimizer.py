"""What the optimizer of a split module reports, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from echelon.core.errors import RunFailed
from echelon.core.event import NoEvents
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.module.module import RankModule
from echelon.parallel.transport.recorder import Recorder
from echelon.training.module.optimizer import agree_on_step, refuse_unused
from tests.training.module import module_state_targets as targets


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_ignored_stays_that_of_each_rank(rank_pool: RankPool, stage: Any) -> None:
    ranks = rank_pool.run(targets.ignore_a_block, targets.plan(stage), world_size=2)
    for rank, (value, gradient, names) in enumerate(ranks):
        assert value == float(rank)
        assert gradient
        assert not any(name.startswith("blocks.1") for name in names)


def test_norms_and_rates_are_those_of_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(targets.reports, targets.plan(3), world_size=2)
    assert first == second
    rates = [report.learning_rate for report in first]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert [report.step for report in first] == [0, 1, 2, 3]


def test_a_parameter_is_right_as_soon_as_step_returns(rank_pool: RankPool) -> None:
    # Loops read parameters between steps (averages, histograms): nothing is under way then.
    for stage in (0, 1, 2):
        whole, current = rank_pool.run(targets.read_after_step, targets.plan(stage), world_size=2)[
            0
        ]
        assert all(torch.equal(whole[name], current[name]) for name in whole)


class Others:
    """A world in which the other ranks say what is given."""

    def __init__(self, said: list[Any]) -> None:
        """Take what they say."""
        self.said = said

    def gather_rows(self, row: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return the row of this rank and those of the others."""
        assert (row.dtype, name) == (torch.float64, "step")
        return torch.stack([row, *(torch.tensor(one, dtype=torch.float64) for one in self.said)])

    def gather_objects(self, mine: object) -> list[Any]:
        """Return what this rank and the others say."""
        return [mine, *self.said]


def make(*said: Any, stage: int = 0, data: int = 0, replicate: int = 0) -> RankModule:
    """Return what is asked of a split module of a trained weight and a frozen bias."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    groups = SimpleNamespace(
        recorder=Recorder(0, NoEvents()),
        world=Others(list(said)),
        data=SimpleNamespace(index=data),
        replicate=SimpleNamespace(index=replicate),
    )
    parameters = [
        SimpleNamespace(spec=SimpleNamespace(name=name), trained=name == "weight")
        for name in ("weight", "bias")
    ]
    zero = SimpleNamespace(stage=stage)
    return cast(
        "RankModule",
        SimpleNamespace(
            model=model,
            groups=groups,
            parameters=parameters,
            device=torch.device("cpu"),
            plan=SimpleNamespace(layout=SimpleNamespace(zero=zero)),
        ),
    )


@pytest.mark.parametrize(
    ("stage", "data", "replicate", "counts"),
    [(0, 0, 0, True), (0, 1, 0, False), (1, 1, 0, True), (3, 0, 1, False)],
)
def test_each_gradient_counts_once(stage: int, data: int, replicate: int, counts: bool) -> None:
    module = make([5.0, 2, 0, 0.1], stage=stage, data=data, replicate=replicate)
    assert agree_on_step(module, 0.1, 3.0, 1) == (5.0 + 3.0 * counts, 3)


def test_rates_that_differ_are_told() -> None:
    with pytest.raises(RunFailed, match=r"learning rates of the ranks are 0\.1, 0\.2") as raised:
        agree_on_step(make([0.0, 0, 0, 0.2]), 0.1, 0.0, 0)
    assert raised.value.rules == ("ranks-in-step",)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_frozen_must_stay_frozen_on_every_rank(elsewhere: bool) -> None:
    module = make([0.0, 0, float(elsewhere), 0.1], [0.0, 0, 1, 0.1])
    module.model.get_parameter("bias").requires_grad_(not elsewhere)
    with pytest.raises(RunFailed, match="has changed on 2 ranks") as raised:
        agree_on_step(module, 0.1, 0.0, 0)
    assert raised.value.rules == ("frozen-changed",)


def test_parameters_without_gradient_are_told_in_the_order_of_the_module() -> None:
    with pytest.raises(RunFailed) as raised:
        refuse_unused(make(["weight", "bias"], ["bias"]), ["bias"], 7)
    assert raised.value.rules == ("unused-parameter",) * 2
    assert [problem.message for problem in raised.value.problems] == [
        "weight got no gradient in step 7 on rank 1",
        "bias got no gradient in step 7 on every rank",
    ]
    assert "ignore=['weight']" in raised.value.problems[0].suggestions
    with pytest.raises(RunFailed, match="on ranks 0, 2"):
        refuse_unused(make([], ["bias"]), ["bias"], 7)
