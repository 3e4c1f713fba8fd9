"""What is taken for a plan: a plan, an answer, a plan of an answer, an imported run; no name."""

from __future__ import annotations

import pytest

import echelon as ec
from echelon.api.given_plan import plan_from_given


def test_an_answer_stands_for_its_plan() -> None:
    answer = ec.plan("nano", "4xcpu", pins=["devices=4"])
    assert plan_from_given(answer) == plan_from_given(answer.plan) == answer.plan
    other = answer.plans[-1]
    assert plan_from_given(other) == other.plan != answer.plan


@pytest.mark.parametrize("wrong", ["nano", 3, None])
def test_what_has_no_plan_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="has none: ec"):
        plan_from_given(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_verb_takes_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ec.plan("nano", "2xcpu", pins=["devices=2", "dp=2"])
    assert ec.prove(answer).proven
    assert ec.bisect(answer) is None
    assert ec.compare(answer, answer.plan).same_layout
    assert ec.compare("nano", answer).b.plan == answer.plan
    assert ec.export(answer, "run.toml").text == ec.export(answer.plan, "run.toml").text
    from echelon.api import training

    jobs: list[object] = []
    monkeypatch.setattr(training, "train_job", lambda job, **_: jobs.append(job.plan))
    ec.train(answer, data="stdlib")
    assert jobs == [answer.plan]
    with pytest.raises(TypeError, match="settings belong to"):
        ec.train(answer, settings=["mesh.tp=2"])
