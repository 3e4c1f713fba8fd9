"""Which unit is used when: order, passes between passes, and units that are used by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel.module import targets
from tests.parallel.module.loops import (
    SLICES,
    STAGES,
    WHOLE,
    assert_as_on_one_device,
    plan,
    run,
)
from tests.parallel.module.models import loss_of, tokens
from tests.parallel.module.refusals import PLAIN, STAGE_3, backward, learned, parallel, refusal
from tests.parallel.module.targets import Loop


def test_evaluation_between_forward_and_backward(rank_pool: RankPool) -> None:
    for zero in (WHOLE, replace(SLICES, reshard_after_forward=False)):
        loop = Loop(plan=plan(zero), microbatches=2, evaluates=True)
        ranks = run(rank_pool, loop)
        assert_as_on_one_device(ranks, loop)
        for rank in ranks:
            assert rank.losses[0] == pytest.approx(2 * rank.losses[1], rel=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("zero", STAGES)
def test_two_forwards_of_one_backward(rank_pool: RankPool, zero: Zero) -> None:
    results = rank_pool.run(targets.two_forwards, plan(zero), world_size=2)
    together, apart = results[0]
    for name, value in together.items():
        torch.testing.assert_close(value, apart[name], rtol=0, atol=1e-12, msg=name)


def test_a_unit_is_not_called_by_itself() -> None:
    model, _ = parallel(STAGE_3)
    block = model.get_submodule("blocks.1")
    assert refusal(lambda: block(torch.zeros(1, 6, 12).double())).rules == (
        "forward-through-module",
    )


def test_a_call_that_a_hook_refuses_leaves_the_next_one_as_it_is() -> None:
    model, optimizer = parallel(STAGE_3)

    def refuse(*_: Any) -> None:
        raise ValueError("not now")

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="not now"):
        model(tokens(0, 0, 0))
    handle.remove()
    loss_of(model, tokens(0, 0, 0)).backward()
    assert optimizer.step().step == 0


def test_units_come_in_the_order_of_the_first_step() -> None:
    model, _ = learned(STAGE_3)
    blocks: Any = model.get_submodule("blocks")
    blocks._modules = dict(reversed(blocks._modules.items()))
    error = refusal(lambda: backward(model))
    assert error.rules == ("unit-out-of-order",)
    assert "its turn has passed" in str(error)


def test_a_backward_of_a_backward_needs_whole_parameters() -> None:
    def second(model: nn.Module) -> torch.Tensor:
        trained = [one for one in model.parameters() if one.requires_grad]
        loss = loss_of(model, tokens(0, 0, 0))
        return torch.autograd.grad(loss, trained, create_graph=True)[0]

    model, optimizer = parallel(PLAIN)
    second(model).square().sum().backward()
    assert optimizer.step().grad_norm > 0
    model, _ = parallel(STAGE_3)
    assert refusal(lambda: second(model)).rules == ("backward-of-backward",)
