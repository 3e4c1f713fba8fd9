"""What a loop of your own can get wrong: one clear error each, on every rank it concerns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.plan import Precision, Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import plan_of
from tests.parallel.module import mistakes
from tests.parallel.module.models import loss_of, make, tokens
from tests.parallel.module.refusals import PLAIN, STAGE_3, backward, learned, parallel, refusal

FP16 = Precision(
    parameters="fp32", gradients="fp32", reduction="fp32", master="fp32", loss_scaling="fixed"
)


@pytest.mark.parametrize(
    ("rule", "told", "arguments"),
    [
        ("module-argument", "gradients = 'average'", {"gradients": "average"}),
        ("module-argument", "unused = None", {"unused": None}),
        ("module-ignore", "'blockz'", {"ignore": ["blockz"]}),
        (
            "module-ignore",
            "no parameter that is trained",
            {"ignore": ["embedding", "blocks", "norm", "head"]},
        ),
        ("module-units", "'layers'", {"units": "layers"}),
        ("module-units", "'blocks.9'", {"units": ["blocks.9"]}),
        ("module-units", "has no forward", {"units": ["blocks"]}),
        ("module-units", "Conv2d", {"units": nn.Conv2d}),
        ("module-units", "Conv2d, Conv1d", {"units": (nn.Conv2d, nn.Conv1d)}),
        ("module-units", "units = 1000000", {"units": 1_000_000}),
        ("module-units", "names no module", {"units": []}),
    ],
)
def test_an_argument_that_does_not_fit(rule: str, told: str, arguments: dict[str, Any]) -> None:
    error = refusal(lambda: parallelize(make("transformer"), STAGE_3, **arguments))
    assert error.rules == (rule,)
    assert told in str(error)


def test_a_module_without_blocks_needs_units_at_stage_3_only() -> None:
    def net() -> nn.Module:
        return nn.Bilinear(3, 4, 5)

    assert refusal(lambda: parallelize(net(), STAGE_3)).rules == ("module-units",)
    assert [row.name for row in parallelize(net(), PLAIN)[1].units()] == ["(root)"]


def test_a_learning_rate_of_ones_own_must_be_announced() -> None:
    model, optimizer = parallel(PLAIN)
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.5
    error = refusal(optimizer.step)
    assert error.rules == ("learning-rate-owner",)
    assert "0.5" in str(error)


def test_a_loss_that_is_not_scaled() -> None:
    model, optimizer = parallel(plan_of(precision=FP16))
    backward(model)
    assert refusal(optimizer.step).rules == ("loss-not-scaled",)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model, optimizer = parallel(PLAIN)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    (loss_of(model, tokens(0, 0, 0)) * float("inf")).backward()
    assert refusal(optimizer.step).rules == ("loss-not-finite",)
    assert all(torch.equal(before[name], one) for name, one in model.named_parameters())


def test_an_update_spoils_graphs_from_before_it() -> None:
    for plan in (PLAIN, STAGE_3):
        model, optimizer = parallel(plan)
        old = loss_of(model, tokens(0, 0, 0))
        backward(model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


def test_parameters_that_are_away_are_neither_saved_nor_loaded_nor_read() -> None:
    model, optimizer = parallel(STAGE_3)
    with optimizer.whole():
        values = {name: one.clone() for name, one in model.state_dict().items()}
    assert refusal(model.state_dict).rules == ("values-away",)
    assert refusal(lambda: model.load_state_dict(values)).rules == ("values-away",)
    assert all(one.isnan().all() for one in model.parameters())
    assert [one.shape for one in model.parameters()] == [
        one.shape for one in make("transformer").parameters()
    ]
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        model.get_parameter("norm.weight").add_(1)


def test_values_that_a_master_copy_would_overwrite_are_not_loaded() -> None:
    bf16 = Precision(parameters="bf16", gradients="bf16")
    model, _ = parallel(plan_of(precision=bf16))
    values = model.state_dict()
    assert refusal(lambda: model.load_state_dict(values)).rules == ("values-away",)


def test_a_state_of_another_rank_or_plan() -> None:
    _, optimizer = learned(PLAIN)
    state = optimizer.state_dict()
    _, other = parallel(STAGE_3)
    assert refusal(lambda: other.load_state_dict(state)).rules == ("module-state",)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_without_gradient_is_named_on_every_rank(
    rank_pool: RankPool, stage: Any
) -> None:
    # Row A6: nothing hangs, and all ranks raise the same before anything is updated.
    zero = Zero(stage=stage, accumulate="slices" if stage > 1 else "whole")
    mesh: dict[str, Any] = {"dp_shard" if stage else "dp": 2}
    plan = plan_of(zero=zero, **mesh)
    ranks = rank_pool.run(mistakes.leave_out_a_block, plan, world_size=2, timeout_s=30.0)
    assert ranks[0] == ranks[1]
    rules, text, unchanged = ranks[0]
    assert set(rules) == {"unused-parameter"}
    assert "blocks.2.norm.weight got no gradient in step 0 on rank 1" in text
    assert unchanged


def test_the_learning_rate_is_one_on_all_ranks(rank_pool: RankPool) -> None:
    plan = plan_of(dp=2)
    ranks = rank_pool.run(mistakes.rates_by_rank, plan, world_size=2, timeout_s=30.0)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ("ranks-in-step",)
    assert "0.001, 0.002" in ranks[0][1]
