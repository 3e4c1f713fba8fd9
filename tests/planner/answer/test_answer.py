"""An answer is one record: its page, its JSON and its numbers are those of the command."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.core.errors import EnvironmentProblem
from echelon.planner.answer.answer import PlanAnswer
from echelon.planner.predict.bands import held_bytes_band, step_band
from echelon.planner.recommend.recommend import Recommendation, recommend
from tests.planner.requests import small

LLAMA = ["plan", "llama3-8b", "--cluster", "8xh100", "--pin", "cp=1,2"]


@pytest.fixture(scope="module", name="answer")
def _answer() -> PlanAnswer:
    found = recommend(small(devices=7))
    assert isinstance(found, Recommendation)
    return PlanAnswer(found=found)


@pytest.mark.slow
def test_the_page_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from echelon.api.planning import plan

    answer = plan("llama3-8b", "8xh100", pins=["cp=1,2"])
    assert main(LLAMA) == 0
    printed = capsys.readouterr().out.splitlines()
    ours = str(answer).splitlines()
    begins = [line.split(" ")[0] for line in ours]
    until = begins.index("next")
    assert ours[:until] == printed[:until]
    assert "ec.prove(answer)" in ours[until]
    assert max(map(len, ours)) <= 80
    assert main([*LLAMA, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    again = json.loads(json.dumps(answer.to_json()))
    for one in (told, again):
        del one["search"]["seconds"]
    assert again == told


def test_a_search_for_another_trainer_goes_on_to_its_files(answer: PlanAnswer) -> None:
    request = replace(answer.found.answer.request, trainer="megatron-core")
    found = replace(answer.found, answer=replace(answer.found.answer, request=request))
    assert 'ec.export(answer, "megatron")' in str(PlanAnswer(found=found))
    assert 'ec.train(answer, data="PATH")' in str(answer)


def test_terms_add_up_to_totals_that_lie_in_their_bands(answer: PlanAnswer) -> None:
    estimate = answer.found.first.ranked.estimate
    assert answer.step_s == step_band(estimate)
    assert answer.held_bytes == held_bytes_band(estimate)
    assert sum(one.value for one in answer.seconds.values()) == pytest.approx(answer.step_s.value)
    assert sum(one.value for one in answer.bytes.values()) == pytest.approx(answer.held_bytes.value)
    for one in (answer.step_s, answer.held_bytes, answer.tokens_per_s_per_device, answer.mfu):
        assert one.low < one.value < one.high
    assert answer.bytes["parameters"].low == answer.bytes["parameters"].high
    assert answer.price_of_a_million_tokens is None
    assert answer.memory_bytes == answer.found.answer.request.cluster.device.memory_bytes
    assert answer.fits == answer.found.first.fits
    assert answer.sure
    assert answer.idle_devices == 1
    assert answer.why in " ".join(str(answer).split())
    assert answer.assumed == answer.found.answer.request.defaults_taken


def test_every_plan_is_there_once_the_recommended_first(answer: PlanAnswer) -> None:
    plans = answer.plans
    assert plans[0].preferred_for == ("recommended",)
    assert plans[0].plan == answer.plan == answer.recommended.plan
    names = [one.preferred_for for one in answer.alternatives]
    assert names
    assert [one.preferred_for for one in plans[1 : 1 + len(names)]] == names
    kinds = [one.ranked.candidate for one in plans]
    assert len({*kinds}) == len(kinds)
    assert {one.candidate for one in answer.found.answer.ranked} <= {*kinds}


def test_it_is_one_line_in_a_shell_and_crosses_processes(answer: PlanAnswer) -> None:
    told = repr(answer)
    assert told.startswith(f"<PlanAnswer {answer.plan.model.name} on ")
    assert str(answer.recommended) in told
    assert len(told.splitlines()) == 1
    assert pickle.loads(pickle.dumps(answer)).plan == answer.plan


def test_a_frame_has_a_row_for_each_plan(answer: PlanAnswer) -> None:
    pytest.importorskip("pandas")
    frame = answer.to_frame()
    assert len(frame) == len(answer.plans)
    assert frame["preferred_for"].tolist()[0] == "recommended"
    assert list(frame["step_s"]) == [one.step_s.value for one in answer.plans]
    assert frame.dtypes["price_of_a_million_tokens"] == frame.dtypes["step_s"]


def test_a_frame_without_pandas_names_what_to_install(
    answer: PlanAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EnvironmentProblem, match="needs the package pandas") as caught:
        answer.to_frame()
    assert "[frames]" in caught.value.problems[0].suggestions[0]
