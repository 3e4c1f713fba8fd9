"""Every word that a page prints of a plan is a pin, and a whole line of it gives the plan back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from echelon.core.errors import ConfigError
from echelon.planner.answer.recommend_text import other_rows, plan_words
from echelon.planner.answer.search_text import plans_table
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import MOST_STAGE
from echelon.planner.search.pins import read_pins
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import search
from echelon.planner.view.text_layout import data_text
from tests.planner.requests import MIXTURE, SMALL, small

SEARCHES: Sequence[tuple[int, Sequence[str], Sequence[str], float]] = (
    (8, SMALL, (), 80.0),
    (8, SMALL, (), 2.0),
    (8, SMALL, ("cp=4",), 80.0),
    (8, SMALL, ("cp=4", "context=ulysses-ring", "ulysses=2"), 80.0),
    (8, SMALL, ("cp=2", "context=gathered,striped"), 80.0),
    (8, SMALL, ("tp=4", "sequence_parallel=off"), 80.0),
    (8, SMALL, ("pp=2", "virtual=2,3"), 80.0),
    (8, SMALL, ("pp=2", "schedule=zb-v,zb-h1"), 80.0),
    (8, SMALL, ("recompute=selective,full/2,full",), 80.0),
    (8, SMALL, ("recompute=full/2+norm+activation",), 80.0),
    (8, SMALL, ("offload=host",), 80.0),
    (16, SMALL, ("zero=3",), 80.0),
    (16, SMALL, ("zero=3", "dp_replicate=2", "reshard=never"), 80.0),
    (16, SMALL, ("zero=3", "gather=int8"), 80.0),
    (8, MIXTURE, (), 80.0),
    (8, MIXTURE, ("ep=4", "tp=2"), 80.0),
    (16, MIXTURE, ("zero=3", "ep=2"), 80.0),
)


def _request(case: tuple[int, Sequence[str], Sequence[str], float]) -> SearchRequest:
    devices, settings, pins, memory = case
    return small(devices=devices, settings=settings, pins=pins, memory_gb=memory)


def _under(request: SearchRequest, pins: Sequence[str]) -> RankedPlan:
    """Return the best plan of a request under other pins."""
    found = search(replace(request, pins=read_pins(pins), top=1))
    assert found.best is not None, pins
    return found.best


def _cells(one: RankedPlan) -> dict[str, str]:
    """Return what the table of plans prints of one, by its heads."""
    head, row = data_text(plans_table([one]), columns=200).splitlines()
    names, cells = (re.split(r" {2,}", line.strip()) for line in (head, row))
    return dict(zip(names, cells, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", SEARCHES, ids=lambda case: ",".join((str(case[0]), *case[2])))
def test_what_a_page_prints_gives_the_plan_back(
    case: tuple[int, Sequence[str], Sequence[str], float],
) -> None:
    request = _request(case)
    found = recommend(request)
    assert isinstance(found, Recommendation)
    plans = {one.candidate: one for one in (found.first.ranked, *found.answer.ranked[:2])}
    for choice, one in plans.items():
        assert _under(request, [plan_words(choice)]).candidate == choice
        cells = _cells(one)
        columns = {"zero": "zero", "schedule": "schedule", "mb": "microbatch", "rec": "recompute"}
        words = [f"{name}={cells[head]}" for head, name in columns.items() if cells[head] != "-"]
        missing = [f"recompute={cells['rec']}"] if cells["rec"] == "-" else []
        pins = [cells["mesh"], *words, *missing, *_not_in_cells(choice)]
        assert _under(request, pins).candidate == choice, pins
    for row, other in zip(other_rows(found), found.others, strict=True):
        assert _under(request, [row[1]]).candidate == other.ranked.candidate, row[1]


def _not_in_cells(choice: CandidatePlan) -> list[str]:
    """Return the choices that a table says only by leaving a sign out."""
    zero = ["secondary=false"] if choice.zero == MOST_STAGE and not choice.keeps_slices else []
    one_kind = choice.mesh.dp_replicate == 1 and choice.zero > 0
    shards = [f"dp_shard={choice.mesh.dp_shard}"] if one_kind else []
    return [f"devices={choice.devices}", *zero, *shards]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("recompute=all", {"recompute": (1,)}),
        ("recompute=1/3", {"recompute": (3,)}),
        ("recompute=-", {"recompute": (0,)}),
        ("recompute=noacat", {"recompute": ("norm+activation+attention",)}),
        ("recompute=norm and activation", {"recompute": ("norm+activation",)}),
        ("recompute=1/3+noac", {"recompute": ("full/3+norm+activation",)}),
        ("recompute=none,norm+mlp", {"recompute": (0, "norm+mlp")}),
        ("schedule=1f1b x6", {"schedule": ("interleaved-1f1b",), "virtual": (6,)}),
        ("schedule=breadth x2", {"schedule": ("breadth-first",), "virtual": (2,)}),
        ("schedule=-", {"pp": (1,)}),
        ("zero=3+s+h", {"zero": (3,), "secondary": (1,), "offload": (1,)}),
        ("zero=3+k", {"zero": (3,), "reshard": (0,)}),
        ("cp=4g", {"cp": (4,), "context": ("gathered",)}),
        ("cp=8u", {"cp": (8,), "context": ("ulysses",)}),
        ("cp=8u2", {"cp": (8,), "context": ("ulysses-ring",), "ulysses": (2,)}),
        ("tp=4s", {"tp": (4,), "sequence_parallel": (1,)}),
        ("dp=2x16", {"dp_replicate": (2,), "dp_shard": (16,)}),
        ("cp4g", {"cp": (4,), "context": ("gathered",)}),
        ("tp4", {"tp": (4,)}),
        ("on 16 devices", {"devices": (16,)}),
    ],
)
def test_a_word_is_a_pin(text: str, values: dict[str, tuple[int | str, ...]]) -> None:
    assert read_pins([text]).values == values


def test_a_line_says_also_what_it_leaves_out_and_other_pins_win() -> None:
    line = "pp2 dp4 tp2s, ZeRO 1, 1f1b, microbatches of 2"
    values = read_pins([line, "offload=host"]).values
    assert (values["cp"], values["recompute"], values["offload"]) == ((1,), (0,), (1,))
    assert read_pins(["pp2 dp4"]).values == {
        **{"pp": (2,), "dp": (4,), "devices": (8,)},
        **dict.fromkeys(("cp", "tp", "ep"), (1,)),
    }
    with pytest.raises(ConfigError) as caught:
        read_pins([line, "zero=2"])
    assert caught.value.rules == ("bad-argument",)
    assert "both pin zero" in caught.value.problems[0].message


@pytest.mark.parametrize("text", ["cp=4x", "cp=4u2g", "zero=1+x", "recompute=nona", "pp2 dq4"])
def test_a_word_that_no_page_prints_is_told_with_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_pins([text])
    assert caught.value.rules == ("unknown-pin",)
    assert caught.value.problems[0].suggestions


@pytest.mark.parametrize(
    ("pins", "rule", "works"),
    [
        (["recompute=full/7"], "unknown-pin", "full/6"),
        (["recompute=full+norm"], "no-effect", "recompute.every = 2"),
        (["recompute=mlp+activation"], "no-effect", 'recompute.operators = ["mlp"]'),
    ],
)
def test_recompute_that_the_model_cannot_have_is_refused_by_rule(
    pins: Sequence[str], rule: str, works: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        small(pins=pins)
    assert caught.value.rules == (rule,)
    assert works in caught.value.problems[0].suggestions
