"""Chunks of rows that go wrong on a ring of tensor ranks, made on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Plan
from echelon.proof.causes.forward.row_pieces import chunk_variants
from echelon.proof.causes.forward.variants import Variant
from echelon.proof.oracle.oracle import hearing, loss_of_tokens, run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.layouts import plan_of
from tests.proof.layouts import layout


def ring(plan: Plan) -> Plan:
    return replace(plan, layout=replace(plan.layout, sequence_parallel=True, tp_overlap="ring"))


PLAN = ring(shrink(layout(tp=4), precision="fp64"))
(ORACLE,) = run_oracle(PLAN, 1)
ALONE = replace(PLAN, layout=replace(PLAN.layout, mesh=replace(PLAN.mesh, tp=1)))


def heard(variant: Variant | None) -> dict[str, torch.Tensor]:
    """Return what passes between the parts of the model where a mistake is made, if any."""
    if variant is None:
        return {name: value.double() for name, value in ORACLE.activations.items()}
    model = variant.build(ALONE, ORACLE)
    with torch.no_grad(), hearing(model) as found:
        loss_of_tokens(ALONE, model, ORACLE)
    return {name: value.double() for name, value in found.forward.items()}


def test_only_plans_in_chunks_have_them() -> None:
    assert len(list(chunk_variants(PLAN))) == 2 + 3
    assert list(chunk_variants(layout(tp=2, sequence_parallel=True))) == []
    assert list(chunk_variants(ring(plan_of(cp=2, tp=2)))) == []


def test_each_mistake_gives_another_output_and_leaves_its_input_right() -> None:
    right = heard(None)
    made: list[torch.Tensor] = []
    for variant in chunk_variants(PLAN):
        found = heard(variant)
        name = "layers.0.attention_norm"
        torch.testing.assert_close(found[name], right[name], rtol=1e-12, atol=1e-12)
        made.append(found["layers.0.attention"])
    made.append(right["layers.0.attention"])
    for place, one in enumerate(made):
        for other in made[place + 1 :]:
            assert float((one - other).abs().max()) > 1e-6


@pytest.mark.parametrize("rank", range(4))
def test_what_comes_twice_is_the_sum_of_the_others(rank: int) -> None:
    """Of the rows of a rank, twice what comes and nothing of it lie around the right sum."""
    twice, never, *_ = (heard(one)["layers.0.attention"] for one in chunk_variants(PLAN))
    right = heard(None)["layers.0.attention"]
    length = right.shape[1] // 4
    rows = slice(rank * length, (rank + 1) * length)
    torch.testing.assert_close(
        (twice[:, rows] + never[:, rows]) / 2, right[:, rows], rtol=1e-12, atol=1e-12
    )
