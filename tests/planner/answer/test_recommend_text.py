"""The page of an answer: about twenty lines, the plan to run first, and the command to go on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.interop.tools import tool_of_trainer
from echelon.planner.answer.answer import PlanAnswer
from echelon.planner.answer.recommend_text import (
    next_commands,
    percent_of_fit,
    plan_words,
    recommendation_text,
)
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import SearchAim, make_request
from tests.planner.requests import small

LLAMA = ["plan", "llama3-8b", "--cluster", "8xh100"]


def test_the_page_is_short_and_says_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--pin", "cp=1,2"]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    labels = [line.split()[0] for line in lines if line[:1].strip()]
    wanted = ["model", "batch", "assumed", "pinned", "run", "step", "memory", "why", "binds"]
    assert [one for one in labels if one in wanted] == wanted
    assert re.search(r"^memory .* GiB .*; allocator's \d+\.\d; fits: >?9\d %", page, re.MULTILINE)
    assert "fastest" in page
    command = " ".join(page[page.index("next") :].split())
    assert "echelon plan llama3-8b --cluster 8xh100 --pin cp=1,2 --out run.toml" in command
    assert "echelon prove run.toml, then echelon train run.toml --set data.source=PATH" in command
    mfu = re.search(r"^step .* MFU [\d.]+ \(full\n +attention; causal [\d.]+\)$", page, re.M)
    assert mfu is not None
    assert "assumed   the batch (of preset llama3-8b); parameters in bf16, the rest" in page
    assert "legal plans" in page
    assert "sum (step)" not in page


@pytest.mark.slow
def test_detail_adds_the_plans_and_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--detail"]) == 0
    page = capsys.readouterr().out
    assert page.index("binds") < page.index("step s  tok/s") < page.index("sum (step)")


def test_a_plan_of_another_tool_is_exported_to_it() -> None:
    commands = next_commands("echelon plan x", tool_of_trainer("megatron-core"))
    assert commands[-1] == "echelon export run.toml --to megatron"
    assert next_commands("echelon plan x", None)[-1].startswith(
        "echelon train run.toml --set data."
    )


def test_a_probability_is_never_certain() -> None:
    assert [percent_of_fit(one) for one in (1.0, 0.96, 0.5, 0.0)] == [
        ">99 %",
        "96 %",
        "50 %",
        "<1 %",
    ]


def test_idle_devices_and_what_is_not_sure_are_told() -> None:
    found = recommend(small(devices=7))
    assert isinstance(found, Recommendation)
    page = recommendation_text(found, "echelon plan nano")
    assert "idle      1 of 7 devices" in page
    assert "probability" not in page
    unsure = replace(found, sure=False)
    assert "try a short run first" in " ".join(recommendation_text(unsure, "").split())


def test_a_run_that_is_far_from_every_measured_one_is_told() -> None:
    pages: dict[str, Recommendation] = {}
    for trainer, cluster in (("megatron-core", "8xh100"), ("torchtitan", "8xrtx3090")):
        aim = SearchAim(trainer=trainer)
        found = recommend(
            make_request("llama3-8b", cluster=cluster, pins=["tp=2,8", "cp=1"], aim=aim)
        )
        assert isinstance(found, Recommendation)
        pages[trainer] = found
    answer = PlanAnswer(found=pages["megatron-core"])
    assert answer.nearest_run_was == ()
    assert "measured  " not in str(answer)
    far = PlanAnswer(found=pages["torchtitan"])
    assert any(one.startswith("on ") for one in far.nearest_run_was)
    told = " ".join(str(far).split())
    assert f"measured nothing near it: the nearest run was {', '.join(far.nearest_run_was)}" in told
    json = far.to_json()["search"]["plans"][0]
    assert json["bands_rest_on"]["nearest_run_was"] == [*far.nearest_run_was]


@pytest.mark.slow
def test_ordinary_pages_have_twenty_lines() -> None:
    for trainer in ("echelon", "megatron-core"):
        found = recommend(
            make_request("llama3-8b", cluster="8xh100", aim=SearchAim(trainer=trainer))
        )
        assert isinstance(found, Recommendation)
        page = recommendation_text(found, "echelon plan llama3-8b --cluster 8xh100")
        assert page.count("\n") <= 22


def test_every_choice_that_is_not_plain_is_said() -> None:
    found = recommend(small(pins=["pp=2", "recompute=full", "tp=2", "schedule=zb-h1"]))
    assert isinstance(found, Recommendation)
    words = plan_words(found.first.ranked.candidate)
    assert words.startswith("pp2 dp2 tp2")
    assert "zb-h1" in words
    assert "all blocks recomputed" in words
