"""Why nothing was found: the pin to blame, the cluster that would do, the batch that would."""

from __future__ import annotations

import pytest

from echelon.core.errors import InfeasiblePlan
from echelon.planner.search.no_plan import best_fitting_plan, explain_no_plan
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import search


def _why(request: SearchRequest) -> InfeasiblePlan:
    answer = search(request)
    assert answer.best is None
    return explain_no_plan(answer)


@pytest.mark.parametrize(
    ("pins", "blamed"),
    [
        (["tp=3"], ["--pin tp="]),
        (["pp=2", "schedule=zb-v", "virtual=3"], ["--pin schedule=", "--pin virtual="]),
        (["recompute=none", "microbatch=128", "tp=1", "zero=0"], ["--pin microbatch="]),
    ],
)
def test_the_pin_that_excludes_everything_is_named(pins: list[str], blamed: list[str]) -> None:
    error = _why(make_request("llama3-8b", cluster="8xh200", pins=pins))
    assert set(error.rules) == {"pin-excludes-everything"}
    works = [problem.suggestions[0] for problem in error.problems]
    assert all(any(work.startswith(name) for work in works) for name in blamed)
    for problem in error.problems:
        name = problem.suggestions[0].removeprefix("--pin ")
        kept = [pin for pin in pins if pin.partition("=")[0] != name.partition("=")[0]]
        assert best_fitting_plan(make_request("llama3-8b", cluster="8xh200", pins=[*kept, name]))


def test_the_smallest_cluster_that_fits_is_named_and_fits() -> None:
    error = _why(make_request("llama2-70b", cluster="8xa100-40gb"))
    assert error.rules == ("plan-fits-memory",)
    works = error.problems[0].suggestions
    assert "116," in error.problems[0].message or "plans of llama2-70b" in error.problems[0].message
    clusters = [work.removeprefix("--cluster ") for work in works if work.startswith("--cluster")]
    assert clusters[0].endswith("xa100-40gb")
    for name in clusters:
        assert search(make_request("llama2-70b", cluster=name)).best is not None


def test_a_batch_that_no_mesh_can_share_out_is_told_with_one_that_can() -> None:
    sets = ["batch.global_sequences=7", "model.layers=2", "model.heads=1", "model.kv_heads=1"]
    request = make_request("nano", cluster="16xh100", settings=sets)
    error = _why(request)
    assert error.rules == ("no-plan-is-legal",)
    assert "batch.global_sequences = 16" in error.problems[0].suggestions
    fixed = make_request(
        "nano", cluster="16xh100", settings=[*sets[1:], "batch.global_sequences=16"]
    )
    assert search(fixed).best is not None


def test_pins_that_exclude_everything_only_together_are_named_together() -> None:
    request = make_request("nano", cluster="8xh100", pins=["tp=3", "pp=5", "zero=0"])
    (problem,) = explain_no_plan(search(request)).problems
    assert problem.rule == "pin-excludes-everything"
    assert "with tp=3 and pp=5 no plan" in problem.message
    assert problem.set_by == "--pin tp=3 --pin pp=5"
    (works,) = problem.suggestions
    pins = [*works.replace("--pin ", "").split(), "zero=0"]
    assert search(make_request("nano", cluster="8xh100", pins=pins)).best is not None


def test_every_degree_that_is_offered_in_place_of_a_pin_works() -> None:
    error = _why(make_request("llama3-8b", cluster="8xh200", pins=["tp=3", "zero=1"]))
    (problem,) = error.problems
    assert len(problem.suggestions) > 2
    for text in problem.suggestions:
        pins = [text.removeprefix("--pin "), "zero=1"]
        assert search(make_request("llama3-8b", cluster="8xh200", pins=pins)).best is not None
