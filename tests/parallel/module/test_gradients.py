"""Gradients as backward passes bring them: once each step, none lost, none counted twice."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel.module.loops import (
    STAGES,
    assert_as_on_one_device,
    plan,
    run,
)
from tests.parallel.module.refusals import PLAIN, backward, parallel, refusal
from tests.parallel.module.targets import Loop


@pytest.mark.one_in(3)
@pytest.mark.system("S03")
@pytest.mark.parametrize("zero", STAGES)
def test_a_branch_that_only_some_ranks_take_neither_hangs_nor_differs(
    rank_pool: RankPool, zero: Zero
) -> None:
    # Row A6: blocks left out on one rank, on both, in the first step and later; a rank that does
    # nothing at all in a step. More blocks than may be in flight.
    skips = {(0, 1): (2,), (1, 0): (0, 9), (1, 1): (9,), (2, 1): (1, 3, 4, 5, 6)}
    loop = Loop(plan=plan(zero), model="deep", unused="zero", skips=skips, idle=[(3, 1)], steps=5)
    ranks = run(rank_pool, loop, timeout_s=30.0)
    assert_as_on_one_device(ranks, loop)
    if zero.stage == 3:
        assert ranks[0].streamed == [f"blocks.{index}" for index in range(10) if index != 2]


@pytest.mark.parametrize("zero", STAGES[:2] + STAGES[4:])
def test_backward_passes_without_sync_send_nothing(rank_pool: RankPool, zero: Zero) -> None:
    # Row A7: three backward passes are one, and one sum per bucket instead of three.
    loop = Loop(plan=plan(zero), microbatches=3)
    ranks = run(rank_pool, loop)
    assert_as_on_one_device(ranks, loop)
    kind = "all_reduce" if zero.stage == 0 else "reduce_scatter"
    names = [event.name for event in ranks[0].events[-1] if event.kind == kind]
    assert len(names) == len(set(names))
    assert names


def test_a_second_backward_would_count_twice() -> None:
    model, optimizer = parallel(PLAIN)
    backward(model)
    assert refusal(lambda: backward(model)).rules == ("second-backward",)
    with optimizer.no_sync():  # nor would this one be summed over the ranks
        assert refusal(lambda: backward(model)).rules == ("second-backward",)


def test_a_backward_that_was_dropped_does_not_count() -> None:
    model, optimizer = parallel(PLAIN)
    backward(model)
    optimizer.zero_grad()
    backward(model)
    norm = optimizer.step().grad_norm
    model, optimizer = parallel(PLAIN)
    backward(model)
    assert optimizer.step().grad_norm == norm


def test_an_interrupted_backward_cannot_be_gone_on_from() -> None:
    model, optimizer = parallel(PLAIN)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("planted")

    handle = model.get_submodule("blocks.0").register_forward_hook(
        lambda module, inputs, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError, match="planted"):
        backward(model)
    handle.remove()
    assert refusal(optimizer.step).rules == ("backward-interrupted",)
