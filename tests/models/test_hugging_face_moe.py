"""One layer of experts and the blocks of transformers: outputs and all gradients, same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.models.batch import TokenBatch
from echelon.models.decoder import mixture_of_experts
from echelon.models.modules import TensorShare
from echelon.models.moe import MixtureOfExperts, RoutingNotes
from echelon.models.operations import Operations
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from tests.models.batches import blank_batch
from tests.models.mixture_blocks import (
    FAMILIES,
    Family,
    give_weights,
    named_as_ours,
    selection_bias,
    theirs,
)
from tests.parallel.layouts import plan_of

T, B = 13, 3
PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64"}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a layer computed: outputs, the gradient of its input, those of its weights."""

    y_ND: torch.Tensor
    dx_ND: torch.Tensor
    gradients: Mapping[str, torch.Tensor]


Compute = Callable[[torch.Tensor], torch.Tensor]


def run(compute: Compute, x_ND: torch.Tensor, dy_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = x_ND.clone().requires_grad_()
    y_ND = compute(leaf)
    y_ND.backward(dy_ND)
    assert leaf.grad is not None
    return y_ND.detach(), leaf.grad


def by_reference(family: Family, block: Any, x: torch.Tensor, dy: torch.Tensor) -> Results:
    operations = Operations()
    if family.experts.router_bias:
        operations.routing = RoutingNotes(biases={0: selection_bias(block)})
    mixture = mixture_of_experts(family.shape, operations, 0, TensorShare()).to(x.dtype)
    give_weights(block, mixture)
    y, dx = run(lambda leaf: mixture(leaf, blank_batch(T, B)), x, dy)
    found = {n: one.grad for n, one in mixture.named_parameters() if one.grad is not None}
    return Results(y_ND=y, dx_ND=dx, gradients=found)


def by_rank(family: Family, block: Any, x: torch.Tensor, dy: torch.Tensor) -> Results:
    plan = plan_of(model=replace(family.shape, max_positions=T), dtype=PRECISIONS[x.dtype])
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    model = apply_plan(plan, groups, torch.device("cpu"))
    mixture = cast(MixtureOfExperts, model.stages[0].layers["0"].mlp)
    assert model.balancer is not None
    if family.experts.router_bias:
        model.balancer.biases[0].copy_(selection_bias(block))
    give_weights(block, mixture)
    model.store.start_step()
    model.balancer.start_step(1.0)
    model.store.start_backward(last=False)
    batch: TokenBatch = blank_batch(T, B)
    y, dx = run(lambda leaf: mixture(leaf, batch), x, dy)
    model.store.run_deferred()
    by_parameter = {id(s.parameter): s.gradient for b in model.buckets for s in b.slots}
    found = {name: by_parameter[id(one)] for name, one in mixture.named_parameters()}
    return Results(y_ND=y, dx_ND=dx, gradients=found)


def compare(
    family: Family, ours: Callable[..., Results], dtype: torch.dtype, implementation: str
) -> None:
    """Assert that outputs and all gradients are the same but for rounding."""
    block = theirs(family, dtype, implementation)
    generator = torch.Generator().manual_seed(6)
    x_ND, dy_ND = (
        torch.randn(T * B, family.shape.hidden, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    y_ND, dx_ND = run(lambda leaf: block(leaf[None])[0], x_ND, dy_ND)
    expected = named_as_ours({n: one.grad for n, one in block.named_parameters()})  # type: ignore[misc]
    found = ours(family, block, x_ND, dy_ND)
    limits = {torch.float32: 1e-5, torch.float64: 1e-10}
    rtol = atol = limits[dtype]
    assert y_ND.std() > 0.1
    torch.testing.assert_close(found.y_ND, y_ND, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.dx_ND, dx_ND, rtol=rtol, atol=atol)
    assert set(found.gradients) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0.01, name
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=rtol, atol=atol * float(gradient.abs().max())
        )


EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
EACH_WAY = pytest.mark.parametrize("ours", [by_reference, by_rank])


@EACH_FAMILY
@EACH_WAY
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_float32(family: Family, ours: Callable[..., Results], implementation: str) -> None:
    compare(family, ours, torch.float32, implementation)


class Wide:
    """Stand in for torch where a router says float32, and mean float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        """Return what torch has by any other name."""
        return getattr(torch, name)


@EACH_FAMILY
@EACH_WAY
def test_float64(
    family: Family, ours: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their routers round to float32 on the way; nothing else of a block does.
    monkeypatch.setattr(family.module, "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    compare(family, ours, torch.float64, "eager")


def test_gates_and_bias_matter() -> None:
    """A comparison in which they did not would show nothing."""
    family = FAMILIES[3]
    block = theirs(family, torch.float64, "eager")
    x_ND = torch.randn(T * B, family.shape.hidden, dtype=torch.float64)
    right = by_reference(family, block, x_ND, x_ND).y_ND
    selection_bias(block).neg_()
    assert not torch.allclose(by_reference(family, block, x_ND, x_ND).y_ND, right, atol=1e-2)
