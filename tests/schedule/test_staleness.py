"""PipeDream's ways to go without a flush have the staleness that their papers state."""

from __future__ import annotations

from math import prod

import pytest

from echelon.schedule.staleness import (
    WEIGHT_UPDATE_RULES,
    StaleStage,
    WeightUpdateRule,
    gives_reference_gradient,
    staleness,
)

BY_NAME = {one.name: one for one in WEIGHT_UPDATE_RULES}
SIZES = [(2, 2), (3, 7), (4, 4), (4, 9), (8, 16)]
STEPS = 4


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_weight_stashing_keeps_a_version_for_each_microbatch_in_flight(p: int, m: int) -> None:
    """w(t+1) = w(t) - lr grad f(w_0 of t-p+1, ..., w_{p-1} of t): arXiv 1806.03377."""
    stages = staleness(BY_NAME["PipeDream"], num_ranks=p, num_microbatches=m)
    assert [stage.staleness for stage in stages] == [p - 1 - s for s in range(p)]
    assert [stage.kept for stage in stages] == [p - s for s in range(p)]
    assert all(stage.is_gradient for stage in stages)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_vertical_sync_makes_all_stages_as_old_as_the_first(p: int, m: int) -> None:
    stages = staleness(BY_NAME["PipeDream, vertical sync"], num_ranks=p, num_microbatches=m)
    assert [stage.staleness for stage in stages] == [p - 1] * p
    # A later stage too keeps what microbatches that are still on their way will read.
    assert [stage.kept for stage in stages] == [p] * p
    forwards = {tuple(one.forward for one in stage.microbatches) for stage in stages}
    assert len(forwards) == 1


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_2bw_has_two_versions_and_is_one_update_behind(p: int, m: int) -> None:
    """W(t+1) = W(t) - lr grad f(W(t-1)): arXiv 2006.09503, section 3.1."""
    stages = staleness(BY_NAME["PipeDream-2BW"], num_ranks=p, num_microbatches=m)
    assert [stage.staleness for stage in stages] == [1] * p
    assert [stage.kept for stage in stages] == [2] * p
    for stage in stages:
        assert [one.forward for one in stage.microbatches[m:]] == [
            step - 1 for step in range(1, STEPS) for _ in range(m)
        ]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_without_stashing_no_weights_have_that_gradient(p: int, m: int) -> None:
    stages = staleness(BY_NAME["without stashing"], num_ranks=p, num_microbatches=m)
    assert [stage.is_gradient for stage in stages] == [s == p - 1 for s in range(p)]
    assert [stage.kept for stage in stages] == [1] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("discipline", WEIGHT_UPDATE_RULES, ids=lambda one: one.name)
def test_only_a_flush_trains_as_one_device_does(
    discipline: WeightUpdateRule, p: int, m: int
) -> None:
    """Weights that follow the table differ from those of one device, but for the flush."""
    stages = staleness(discipline, num_ranks=p, num_microbatches=m, num_steps=STEPS)
    per_update = m if discipline.whole_steps else 1
    trained = _trained(stages, per_update)
    assert (trained == _trained_on_one_device(p, STEPS * m, per_update)) is discipline.flush
    assert gives_reference_gradient(stages) is discipline.flush


@pytest.mark.parametrize("discipline", WEIGHT_UPDATE_RULES, ids=lambda one: one.name)
def test_one_rank_has_nothing_in_flight(discipline: WeightUpdateRule) -> None:
    assert gives_reference_gradient(staleness(discipline, num_ranks=1, num_microbatches=3))


def _gradients(forward: list[float], backward: list[float], sample: float) -> list[float]:
    """Return d/dw_s of (w_{p-1} ... w_0 x)^2 / 2, as a pipeline computes it stage by stage."""
    out = prod(forward, start=sample)
    return [
        out * prod(forward[:s], start=sample) * prod(backward[s + 1 :], start=1.0)
        for s in range(len(forward))
    ]


def _trained(stages: tuple[StaleStage, ...], per_update: int) -> list[float]:
    """Return the weights of a chain of one weight a stage, trained with the versions of a table."""
    versions = [[_start(s)] for s in range(len(stages))]
    total = [0.0] * len(stages)
    for number in range(len(stages[0].microbatches)):
        seen = [stage.microbatches[number] for stage in stages]
        forward = [versions[s][one.forward] for s, one in enumerate(seen)]
        backward = [versions[s][one.backward] for s, one in enumerate(seen)]
        new = _gradients(forward, backward, _sample(number))
        total = [a + b for a, b in zip(total, new, strict=True)]
        if (number + 1) % per_update == 0:
            for history, gradient in zip(versions, total, strict=True):
                history.append(_updated(history[-1], gradient))
            total = [0.0] * len(stages)
    return [history[-1] for history in versions]


def _trained_on_one_device(p: int, num_samples: int, per_update: int) -> list[float]:
    weights = [_start(s) for s in range(p)]
    for start in range(0, num_samples, per_update):
        samples = [_sample(number) for number in range(start, start + per_update)]
        found = [_gradients(weights, weights, sample) for sample in samples]
        sums = [sum(parts, 0.0) for parts in zip(*found, strict=True)]
        weights = [_updated(w, g) for w, g in zip(weights, sums, strict=True)]
    return weights


def _start(stage: int) -> float:
    return (stage + 2) / (stage + 1)


def _sample(number: int) -> float:
    return (number % 3 + 1) / 2


def _updated(weight: float, gradient: float) -> float:
    return weight - gradient / 1000
