"""Ulysses: heads for positions and back, each motion the transpose of the other."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from echelon.core.plan import ContextKind
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.collectives import Group, Pending
from tests.parallel.context.cases import context_plan, inputs_of, run, sent

BOTH: ContextKind = "ulysses-ring"


@pytest.mark.system("B08")
@pytest.mark.parametrize("causal", [True, False])
def test_at_its_ends_a_ring_of_ulysses_groups_is_the_pure_kind(
    causal: bool, rank_pool: RankPool
) -> None:
    ends: tuple[tuple[ContextKind, int], ...] = (("ring", 1), ("ulysses", 4))
    for pure, ulysses in ends:
        plans = [context_plan(kind, 4, ulysses, causal=causal) for kind in (pure, BOTH)]
        inputs = inputs_of(plans[0], documents=False)
        first, second = (run(plan, inputs, rank_pool) for plan in plans)
        for one, other in zip(first, second, strict=True):
            for name in ("positions", "out", "dq", "dk", "dv"):
                assert torch.equal(getattr(one, name), getattr(other, name)), (pure, name)
            assert sent(one) == sent(other)


class _Mirror:
    """A group of two whose members are alike: what one sends, it gets back in its place."""

    size = 2

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        assert received.shape == sent.shape
        received.copy_(sent)
        return Pending()


@pytest.mark.system("S32")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_gradients_are_the_transpose_of_the_motions(heads: int, kv_heads: int) -> None:
    group, store = cast("Group", _Mirror()), GradientStore(Reduction())
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [noise(3, 2, h, 5).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    outputs = PositionsToHeads.apply(*inputs, group, store)
    held = max(1, kv_heads // 2)
    assert [out.shape for out in outputs] == [(6, 2, h, 5) for h in (heads // 2, held, held)]
    weights = [noise(*out.shape) for out in outputs]
    torch.autograd.backward(outputs, weights)
    given = sum(float((x.detach() * g).sum()) for x, g in zip(outputs, weights, strict=True))
    back = sum(float((x.detach() * x.grad).sum()) for x in inputs if x.grad is not None)
    assert given == pytest.approx(back)
    out = HeadsToPositions.apply(outputs[0].detach(), group, store)
    assert torch.equal(out, inputs[0])
