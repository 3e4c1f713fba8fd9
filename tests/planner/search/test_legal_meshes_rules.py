"""Every row of a search with every choice is a legal Plan, and what is refused breaks its rule."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import ConfigError
from echelon.cost.seconds.from_plan import layout_numbers_from_plan
from echelon.planner.search.candidate import ScoredCandidate
from echelon.planner.search.legal_meshes import (
    Legality,
    LegalMeshes,
    expert_fold_degrees,
    legal_meshes,
    take_columns,
)
from echelon.planner.search.options import pinned_zero_options, recompute_options, schedule_options
from echelon.planner.search.pins import read_pins
from echelon.planner.search.request import SearchRequest
from tests.planner.requests import MIXTURE, SMALL, small
from tests.walks import examples


@lru_cache
def _space(devices: int, *, mixture: bool) -> tuple[SearchRequest, LegalMeshes]:
    request = small(devices=devices, settings=MIXTURE if mixture else SMALL)
    return request, legal_meshes(request, devices, Legality(request.one_rank_run))


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_what_is_searched_is_legal_and_the_same_numbers(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from((1, 4, 6, 8, 16, 24)))
    request, rows = _space(devices, mixture=data.draw(st.booleans()))
    row = data.draw(st.integers(0, len(rows) - 1))
    one = take_columns(rows.columns, np.array([row]))
    dp, cp, ep, pp = (int(one[name][0]) for name in ("dp", "cp", "ep", "pp"))
    inner = int(expert_fold_degrees(one, np.ones(1, dtype=np.int64))[0])
    offload = data.draw(st.booleans())
    shares = pinned_zero_options(request.pins, (dp, cp, ep, inner), offload=offload)
    count = int(one["microbatches"][0])
    layers = request.model.layers
    orders = [order for order in schedule_options(request.pins, pp, layers) if order.allows(count)]
    if not orders:
        return
    choice = ScoredCandidate(
        value=0.0,
        columns=rows.columns,
        row=row,
        zero_option=data.draw(st.sampled_from(shares)),
        schedule_option=data.draw(st.sampled_from(orders)),
        recompute=data.draw(st.sampled_from(recompute_options(request))),
    ).candidate()
    plan = request.job(choice.settings(has_experts=request.model.experts is not None)).plan
    assert layout_numbers_from_plan(plan) == choice.numbers()
    assert plan.mesh.world_size == devices == choice.devices


@pytest.mark.parametrize(
    ("devices", "rule", "changed"),
    [
        (3, "tp-divides-heads", {"mesh.tp": 3}),
        (8, "tp-divides-kv-heads", {"mesh.tp": 8}),
        (8, "layers-fill-stages", {"mesh.pp": 8}),
        (16, "batch-divides", {"mesh.dp_replicate": 16}),
        (16, "ulysses-divides-heads", {}),
        (24, "context-divides-sequence", {}),
    ],
)
def test_refused_choices_are_counted_under_the_rule_that_they_break(
    devices: int, rule: str, changed: dict[str, object]
) -> None:
    request, rows = _space(devices, mixture=False)
    if rule in ("ulysses-divides-heads", "context-divides-sequence"):
        # Long contexts are bounded; what is pinned is not.
        texts = ["cp=16" if rule.startswith("ulysses") else "cp=12", "tp=1"]
        request = SearchRequest(
            one_rank_run=request.one_rank_run,
            layers=request.layers,
            cluster=request.cluster,
            pins=read_pins(texts),
        )
        rows = legal_meshes(request, devices, Legality(request.one_rank_run))
    assert rows.refused[rule] > 0
    if changed:
        with pytest.raises(ConfigError) as caught:
            request.job(changed)
        assert rule in caught.value.rules


def test_refused_experts_are_counted_too() -> None:
    request, rows = _space(24, mixture=True)
    assert rows.refused["ep-divides-ranks"] > 0
    assert set(rows.columns["ep"]) <= {1, 2, 4, 8}
    assert request.model.experts is not None


def test_layers_need_not_divide_and_degrees_need_not_be_powers_of_two() -> None:
    _, rows = _space(24, mixture=False)
    assert {4, 6} <= set(rows.columns["pp"])
    assert {3, 6, 12} <= set(rows.columns["dp"])
