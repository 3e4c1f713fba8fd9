"""B leaves weight gradients and W computes them: the same bits, and no memory kept for longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from echelon.core.plan import Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel import targets
from tests.parallel.buckets import matrix, store_of
from tests.parallel.layouts import plan_of
from tests.parallel.pipeline import varied_targets
from tests.parallel.pipeline.pipelines import EIGHT, EVERY, pipeline_plan
from tests.parallel.targets import Trained

X = matrix(5, 3, seed=7).detach()
DY = matrix(5, 4, seed=8).detach()
ROWS = torch.tensor([1, 1, 3, 0, 2])


def test_nothing_is_written_before_w_and_all_of_it_by_w() -> None:
    weight, norm, table = matrix(4, 3), matrix(3, seed=1), matrix(4, 3, seed=2)
    store = store_of({"weight": weight, "norm": norm, "table": table})
    for slot in store.buckets[0].slots:
        slot.gradient.fill_(99)
    with store.collects() as work:
        store.add_matmul([weight], DY, X)
        store.add(norm, X[0])
        store.add_rows(table, ROWS, X)
    assert len(work) == 3
    assert all(slot.gradient.eq(99).all() for slot in store.buckets[0].slots)
    store.start_backward(last=True)
    store.run_collected(work)
    gradients = {slot.spec.name: slot.gradient for slot in store.buckets[0].slots}
    assert torch.equal(gradients["weight"], DY.t() @ X)
    assert torch.equal(gradients["norm"], X[0])
    assert torch.equal(gradients["table"], torch.zeros(4, 3, dtype=X.dtype).index_add_(0, ROWS, X))


def test_w_lets_go_of_each_input_when_it_has_used_it() -> None:
    first, second = matrix(4, 3), matrix(4, 3, seed=1)
    store = store_of({"first": first, "second": second})
    inputs = [X.clone(), X.clone()]
    alive = [weakref.ref(one) for one in inputs]
    with store.collects() as work:
        store.add_matmul([first], DY, inputs[0])
        store.defer(lambda: seen.append([one() is not None for one in alive]))
        store.add_matmul([second], DY, inputs[1])
    inputs.clear()
    seen: list[list[bool]] = []
    store.start_backward(last=True)
    store.run_collected(work)
    assert seen == [[False, True]]
    assert [one() for one in alive] == [None, None]
    assert work == []


def test_what_the_next_needs_is_fetched_while_one_is_computed() -> None:
    store = store_of({"weight": matrix(4, 3)})
    done: list[str] = []
    with store.collects() as work:
        for name in "abc":
            store.defer(
                lambda name=name: done.append(f"run {name}"),
                lambda name=name: done.append(f"fetch {name}"),
            )
    assert done == []
    store.run_collected(work)
    assert done == ["fetch a", "fetch b", "run a", "fetch c", "run b", "run c"]


def test_after_an_error_in_b_gradients_are_written_at_once_again() -> None:
    weight = matrix(4, 3)
    store = store_of({"weight": weight})
    with pytest.raises(ValueError, match="in B"), store.collects():
        raise ValueError("in B")
    store.start_backward(last=True)
    store.add_matmul([weight], DY, X)
    assert torch.equal(store.buckets[0].slots[0].gradient, DY.t() @ X)


def test_w_runs_no_graph() -> None:
    weight = matrix(4, 3)
    store = store_of({"weight": weight})
    x = X.clone().requires_grad_()
    with store.collects() as work:
        store.add_matmul([weight], DY, x)
    store.start_backward(last=True)
    store.run_collected(work)
    assert not store.buckets[0].slots[0].gradient.requires_grad


def train(rank_pool: RankPool, schedule: str, pp: int, **changes: Any) -> list[Trained]:
    """Take two steps of a pipeline."""
    plan = pipeline_plan(schedule, pp, **changes)
    return rank_pool.run(targets.train, (plan, 2), world_size=plan.mesh.world_size)


@pytest.mark.system("B02")
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": Recompute(policy="full")},
        {"tp": 2, "sequence_parallel": True},
        {"dp_shard": 2, "zero": Zero(stage=3)},
    ],
    ids=["alone", "recompute", "sequence parallel", "zero3"],
)
def test_split_backward_gives_the_bits_of_the_whole_one(
    rank_pool: RankPool, changes: dict[str, Any]
) -> None:
    whole = train(rank_pool, "1f1b", 2, **changes)
    split = train(rank_pool, "zb-h1", 2, **changes)
    kinds = {event.kind for rank in split for event in rank.events[0]}
    assert {"F", "B", "W"} <= kinds
    assert "BW" not in kinds
    # Both add up microbatches in the same order.
    for one, two in zip(whole, split, strict=True):
        assert one.losses == two.losses
        assert one.norms == two.norms
        for name, shards in one.parameters.items():
            for mine, its in zip(shards, two.parameters[name], strict=True):
                assert torch.equal(mine.tensor, its.tensor), name


def varied_lengths(count: int) -> tuple[int, ...]:
    """Return sequence lengths of so many microbatches, of three kinds."""
    return tuple(3 + 2 * (one % 3) for one in range(count))


@pytest.fixture(scope="module")
def varied_alone(rank_pool: RankPool) -> Callable[[int], varied_targets.Varied]:
    """Return a function that trains on one rank, once for each number of microbatches."""

    @cache
    def train(count: int) -> varied_targets.Varied:
        alone = plan_of(model=EIGHT, schedule="gpipe", microbatches=count)
        (whole,) = rank_pool.run(varied_targets.train, (alone, varied_lengths(count)), world_size=1)
        return whole

    return train


@pytest.mark.quick("2-1f1b", "2-interleaved-1f1b", "4-zb-v", "4-dualpipe", "2-file")
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_takes_microbatches_of_any_length(
    rank_pool: RankPool,
    varied_alone: Callable[[int], varied_targets.Varied],
    schedule: str,
    pp: int,
) -> None:
    plan = pipeline_plan(schedule, pp)
    lengths = varied_lengths(plan.num_microbatches)
    whole = varied_alone(plan.num_microbatches)
    ranks = rank_pool.run(varied_targets.train, (plan, lengths), world_size=pp)
    for rank in ranks:
        assert rank.loss == pytest.approx(whole.loss, rel=1e-13)
        assert rank.evaluated == pytest.approx(whole.evaluated, rel=1e-12)
        for name, gradient in rank.gradients.items():
            expected = whole.gradients[name]
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    seen = {name for rank in ranks for name in rank.gradients}
    assert seen == set(whole.gradients)
    rows = [one * plan.layout.microbatch_sequences for one in lengths]
    assert len(set(rows)) == 3
    for rank in ranks:
        for name, num_bytes in rank.sent:
            microbatch = int(name.split()[1])
            assert num_bytes == rows[microbatch] * plan.model.hidden * 8, name
