"""The recorded run is data parallelism: one start, a mean of gradients, one update."""

from __future__ import annotations

import pytest

from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.page.lessons.recorded_steps import (
    NAMES,
    as_on_one_device,
    mean_loss,
    number_text,
    numbers_text,
    recorded_run,
    same_weights,
)


@pytest.mark.system("S58")
def test_every_rank_starts_with_the_weights_of_rank_0() -> None:
    run = recorded_run()
    assert run.num_ranks == 4
    assert run.given[1] != run.given[0], "ranks were given other weights"
    assert all(one == run.given[0] for one in run.start)


def test_each_sample_is_on_one_rank() -> None:
    run = recorded_run()
    for step, ranks in enumerate(run.steps):
        read = [sample for one in ranks for sample in one.samples]
        assert read == list(range(32 * step, 32 * step + 32))
        assert [len(one.samples) for one in ranks] == [8] * 4


def test_sums_are_those_of_the_gradients_and_updates_those_of_the_mean() -> None:
    run = recorded_run()
    before = run.start[0]
    for number, ranks in enumerate(run.steps):
        for name in NAMES:
            columns = zip(*(one.gradients[name] for one in ranks), strict=True)
            total = [sum(column) for column in columns]
            for one in ranks:
                assert list(one.sums[name]) == pytest.approx(total, rel=1e-12)
            mean = run.mean(number, name)
            wanted = [
                weight - run.learning_rate * gradient
                for weight, gradient in zip(before[name], mean, strict=True)
            ]
            assert list(ranks[0].weights[name]) == pytest.approx(wanted, rel=1e-12)
        assert same_weights(run, number)
        before = ranks[0].weights


def test_the_mean_is_the_gradient_of_the_whole_batch() -> None:
    run = recorded_run()
    assert as_on_one_device(run)
    assert mean_loss(run, 0) == pytest.approx(run.alone_loss, rel=1e-12)
    assert mean_loss(run, 1) < mean_loss(run, 0)


def test_a_sum_starts_before_backward_ends_and_sends_what_the_formula_says() -> None:
    run = recorded_run()
    padded = 4 * 8  # elements of a bucket, bytes of one
    for one in run.steps[0]:
        assert one.sends_early
        assert [kind for kind, _ in one.order][:2] == ["load", "forward"]
        assert one.order[-1][0] == "update"
        assert set(one.sent.values()) == {all_reduce_bytes(padded, 4)}
        for name in NAMES:
            assert len(one.messages[name]) == 2 * 3, "two phases around the ring"
    nexts = [set(one.messages["hidden.weight"]) for one in run.steps[0]]
    assert nexts == [{1}, {2}, {3}, {0}]


def test_numbers_are_written_short() -> None:
    assert number_text(-0.000001) == "0"
    assert number_text(1.25) == "1.25"
    assert numbers_text((1.0, -0.5, 0.0, 2.0), "hidden.weight") == "   1 -0.5\n   0    2"
