"""Gradients cut by context rank add up, and attention done in pieces is attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.operations import Operations
from echelon.prove.batches import global_batch
from echelon.prove.context_parts import loss_parts, row_parts, tokens_of_context
from echelon.prove.context_places import context_places
from echelon.prove.diagnosis import Finding
from echelon.prove.oracle import OracleStep, build_decoder, run_oracle, token_losses
from echelon.prove.returned import Returned, WrongReturn, wrong_returns
from echelon.prove.shrink import shrink
from echelon.prove.variants_context import context_variants
from echelon.prove.variants_rows import row_variants
from echelon.prove.wrong_attention import CountedAttention
from tests.prove.layouts import layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": {"mesh": {"cp": 2}, "dp": 2, "tied": True},
    "striped": {"mesh": {"cp": 4}, "documents": "separate", "model": {"qk_norm": True}},
    "gathered": {"mesh": {"cp": 2}, "model": {"window": 5, "soft_cap": 2.0}, "tp": 2},
    "ulysses-ring": {"mesh": {"cp": 4}, "ulysses": 2, "model": {"dropout": 0.1}},
    "ulysses": {"mesh": {"cp": 2}, "ulysses": 2, "model": {"positions": "learned", "kv_heads": 1}},
}


def _plan(kind: str) -> Plan:
    chosen = dict(LAYOUTS[kind])
    context = {"kind": kind, "ulysses_degree": chosen.pop("ulysses", 1)}
    return shrink(layout(context=context, accumulation=1, **chosen), precision="fp64")


def _gradients(
    plan: Plan, oracle: OracleStep, operations: Operations, names: list[str]
) -> list[torch.Tensor]:
    model = build_decoder(plan, oracle.before, operations)
    batch = global_batch(plan, oracle.step)
    loss = token_losses(plan, model, batch, oracle.step).sum() / oracle.tokens
    return list(torch.autograd.grad(loss, [model.get_parameter(name) for name in names]))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_parts_of_context_ranks_add_up(kind: str) -> None:
    plan = _plan(kind)
    (oracle,) = run_oracle(plan, 1)
    assert sum(tokens_of_context(plan, 0).values()) == oracle.tokens
    for name in ("embedding.weight", "layers.0.attention.k.weight", "layers.1.mlp_norm.weight"):
        right = oracle.gradients[name]
        by_rows, by_losses = row_parts(plan, oracle, name), loss_parts(plan, oracle, name)
        for parts in (by_rows, by_losses):
            assert len(parts) == plan.mesh.dp * plan.mesh.cp
            torch.testing.assert_close(sum(parts.values()), right)
        # They are two ways to cut it, but for what comes after the last attention.
        differ = float((by_rows[0, 0] - by_losses[0, 0]).norm() / right.norm())
        assert (differ < 1e-12) == (name == "layers.1.mlp_norm.weight")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_that_come_home_right_are_right(kind: str) -> None:
    plan = _plan(kind)
    (oracle,) = run_oracle(plan, 1)
    right = WrongReturn(
        finding=Finding(factor="1", says="right"), way=lambda giver, gradient: gradient
    )
    names = [name for name in oracle.gradients if name.startswith("layers.")]
    found = _gradients(plan, oracle, Returned(plan, right), names)
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, oracle.gradients[name])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_wrong_way_home_gives_the_right_gradients_or_those_of_another(kind: str) -> None:
    plan = _plan(kind)
    (oracle,) = run_oracle(plan, 1)
    names = [f"layers.1.attention.{part}.weight" for part in ("q", "k", "v")]
    right = torch.cat([oracle.gradients[name].flatten() for name in names])
    seen: list[torch.Tensor] = []
    for way in wrong_returns(plan):
        found = _gradients(plan, oracle, Returned(plan, way), names)
        one = torch.cat([gradient.flatten() for gradient in found])
        wrong = float((one - right).norm() / right.norm())
        # What comes home at a step where nothing does is nothing lost.
        assert wrong > 1e-4 or way.finding.factor == "stale", way.finding.says
        seen.append(one)
    assert len(seen) >= 3


@pytest.mark.parametrize("kind", LAYOUTS)
def test_pairs_that_meet_once_give_the_losses_of_one_device(kind: str) -> None:
    plan = _plan(kind)
    (oracle,) = run_oracle(plan, 1)
    batch = global_batch(plan, 0)
    with torch.no_grad():
        right = token_losses(plan, build_decoder(plan, oracle.before), batch, 0)
        counted = CountedAttention(lambda seen, batch: seen)
        model = build_decoder(plan, oracle.before, counted)
        torch.testing.assert_close(token_losses(plan, model, batch, 0), right)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_mistake_shows_in_the_losses(kind: str) -> None:
    plan = _plan(kind)
    (oracle,) = run_oracle(plan, 1)
    batch = global_batch(plan, 0)
    tried: dict[str, float] = {}
    with torch.no_grad():
        right = token_losses(plan, build_decoder(plan, oracle.before), batch, 0)
        for variant in (*row_variants(plan, oracle), *context_variants(plan, oracle)):
            found = token_losses(plan, variant.build(), batch, 0)
            assert bool(found.isfinite().all()), variant.finding.says
            assert variant.finding.axis == "cp"
            tried[variant.finding.says] = float((found - right).norm() / right.norm())
    assert len(tried) > 10
    # Whether a query meets keys in a second and a third piece is a matter of the mask.
    pieces = "the outputs of pieces"
    assert not [s for s, change in tried.items() if change < 1e-7 and not s.startswith(pieces)]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_places_say_where_each_position_lies(kind: str) -> None:
    plan = _plan(kind)
    placement, places = plan.placement, context_places(plan.placement)
    for rank in range(placement.degree):
        held = (places.rank_T == rank).nonzero()[:, 0]
        order = places.local_T[held].argsort()
        assert held[order].tolist() == placement.positions(rank)
        assert set(places.place_T[held].tolist()) == {placement.ring_place(rank)}
    everywhere = list(range(placement.length))
    for moved_T in (places.contiguous_T, places.moved(1), places.moved_ranks(1)):
        assert sorted(moved_T.tolist()) == everywhere
    assert places.moved(0).tolist() == places.moved_ranks(0).tolist() == everywhere
    assert bool(
        (places.rank_T[places.moved_ranks(1)] == (places.rank_T + 1) % placement.degree).all()
    )
