"""What a loop of your own can get wrong: one clear error each, on every rank it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.api.parallelize import parallelize
from echelon.core.errors import EchelonError
from echelon.core.plan import Optimizer, Plan, Precision, Recompute, Zero
from echelon.launch.pool import RankPool
from echelon.train.module_optimizer import ModuleOptimizer
from tests.parallel import module_mistakes as mistakes
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.parallel.module_models import loss_of, make, tokens

PLAIN = plan_of()
STAGE_3 = plan_of(zero=Zero(stage=3))
FP16 = Precision(
    parameters="fp32", gradients="fp32", reduction="fp32", master="fp32", loss_scaling="fixed"
)


def refusal(call: Callable[[], object]) -> EchelonError:
    """Return the error that a call raises."""
    with pytest.raises(EchelonError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("module-mesh", plan_of(tp=2)),
        ("module-mesh", plan_of(pp=2)),
        ("module-settings", plan_of(recompute=Recompute(policy="full"))),
        ("module-settings", plan_of(optimizer=Optimizer(kind="muon"))),
        ("module-settings", plan_of(model=MIXTRAL)),
        ("module-mesh", plan_of(dp_shard=2, ep=2)),
        ("module-ranks", plan_of(dp=2)),
    ],
)
def test_a_plan_that_does_not_fit(rule: str, plan: Plan) -> None:
    assert refusal(lambda: parallelize(make("transformer"), plan)).rules == (rule,)


def test_two_axes_are_two_problems_with_their_values() -> None:
    error = refusal(lambda: parallelize(make("transformer"), plan_of(tp=2, pp=2)))
    assert error.rules == ("module-mesh", "module-mesh")
    assert "mesh.pp = 2" in str(error)
    assert "mesh.tp = 2" in str(error)


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


def test_parameters_that_cannot_be_split() -> None:
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    complex_numbers = nn.Module()
    complex_numbers.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    complex_numbers.bias = nn.Parameter(torch.zeros(3))
    split, _ = parallelize(nn.Linear(3, 3), PLAIN)
    for module, told in (
        (empty, "weight and 1 more are on the meta device"),
        (complex_numbers, "weight is"),
        (split, "split already"),
    ):
        error = refusal(lambda module=module: parallelize(module, PLAIN))
        assert error.rules == ("module-parameters",)
        assert told in str(error)


def parallel(plan: Plan, **arguments: Any) -> tuple[nn.Module, ModuleOptimizer]:
    """Return a transformer on one rank."""
    return parallelize(make("transformer"), plan, **arguments)


def backward(model: nn.Module, step: int = 0) -> None:
    """Run one forward and backward."""
    loss_of(model, tokens(step, 0, 0)).backward()


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


def test_what_is_frozen_is_known_at_the_start() -> None:
    model, optimizer = parallel(PLAIN)
    backward(model)
    model.get_parameter("positions").requires_grad_(True)
    assert refusal(optimizer.step).rules == ("frozen-changed",)
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    assert refusal(lambda: optimizer.add_param_group(group)).rules == ("frozen-changed",)


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


def learned(plan: Plan) -> tuple[nn.Module, ModuleOptimizer]:
    """Return a transformer whose first step is over."""
    model, optimizer = parallel(plan)
    backward(model)
    optimizer.step()
    return model, optimizer


def test_a_unit_is_not_called_by_itself() -> None:
    model, _ = parallel(STAGE_3)
    block = model.get_submodule("blocks.1")
    assert refusal(lambda: block(torch.zeros(1, 6, 12).double())).rules == (
        "forward-through-module",
    )


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


def test_a_state_of_another_rank_or_plan() -> None:
    _, optimizer = learned(PLAIN)
    state = optimizer.state_dict()
    _, other = parallel(STAGE_3)
    assert refusal(lambda: other.load_state_dict(state)).rules == ("module-state",)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", "parameter weight is not the same on ranks 0 and 1: (3, 3)"),
        ("frozen", "torch.float32 trained and (3, 3) torch.float32 frozen"),
        ("buffer", "buffer scale is not the same on ranks 0 and 1"),
        ("order", "the order of parameters"),
        ("plan", "the plan is not the same"),
    ],
)
def test_ranks_hold_the_same_module(rank_pool: RankPool, kind: str, told: str) -> None:
    for rules, text in rank_pool.run(mistakes.different_modules, kind, world_size=2):
        assert rules == ("module-same",)
        assert told in text


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
