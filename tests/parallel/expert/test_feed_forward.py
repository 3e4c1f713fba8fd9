"""Experts one after the other: outputs and all gradients as autograd gives them."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.nn import functional as fn

from echelon.models.moe import Expert, MixtureOfExperts
from echelon.parallel.expert.feed_forward import ExpertFeedForward
from echelon.parallel.tensor import TensorSplit
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.parallel.one_rank import alone

COUNTS = [3, 0, 5, 1, 0, 2, 0, 4]


def by_autograd(expert: Expert, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return the weighted output of one expert."""
    inner = fn.silu(x @ expert.gate.weight.T) * (x @ expert.up.weight.T)
    return (inner * gates[:, None]) @ expert.down.weight.T


@pytest.mark.parametrize("exchanges", [False, True])
def test_outputs_and_gradients_are_those_of_autograd(exchanges: bool) -> None:
    model, groups = alone(plan_of(model=MIXTRAL))
    mixture = cast(MixtureOfExperts, model.stages[0].get_submodule("layers.0.mlp"))
    split = TensorSplit(
        group=groups.tensor, sequence_parallel=False, store=model.store, exchanges=exchanges
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(15, MIXTRAL.hidden, generator=generator, dtype=torch.float64)
    gates = torch.rand(15, generator=generator, dtype=torch.float64)
    dy = torch.randn(15, MIXTRAL.hidden, generator=generator, dtype=torch.float64)
    x, gates = x.requires_grad_(), gates.requires_grad_()
    held = mixture.held()
    rows = zip(held, x.split(COUNTS), gates.split(COUNTS), strict=True)
    expected = torch.cat([by_autograd(expert, part, one) for expert, part, one in rows])
    weights = dict(mixture.experts.named_parameters())
    wanted = torch.autograd.grad(expected, [x, gates, *weights.values()], dy)
    model.store.start_step()
    model.store.start_backward(last=True)
    y = ExpertFeedForward.apply(x, gates, held, COUNTS, split)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    y.backward(dy)
    # Where something is sent next, weight gradients wait for it.
    assert all(slots[id(one)].fresh is exchanges for one in weights.values())
    model.store.run_deferred()
    gradients = [x.grad, gates.grad, *(slots[id(one)].gradient for one in weights.values())]
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert not slots[id(held[1].down.weight)].gradient.any()
