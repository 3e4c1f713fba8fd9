"""Why nothing was found: the pin to blame, the cluster that would do, the batch that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import echelon as ec
from echelon.config.cluster.devices import common_devices
from echelon.core.errors import InfeasiblePlan
from echelon.core.units import binary_bytes
from echelon.planner.explain.no_plan import LeanestPlan, NothingFits, explain_no_plan, leanest_plan
from echelon.planner.search.pins import read_pins
from echelon.planner.search.ranked import estimate_candidate
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import best_fitting_plan, search
from tests.planner.requests import small


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
    works = [text for problem in error.problems for text in problem.suggestions]
    assert all(any(work.startswith(name) for work in works) for name in blamed)
    for text in works:
        if text.startswith("--pin "):
            request = _as_typed("llama3-8b", "8xh200", pins, text)
            assert best_fitting_plan(request) or best_fitting_plan(request, offload=True)


@pytest.mark.slow
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
    assert "8 devices % tp 3 = 2, 8 devices % pp 5 = 3" in problem.message
    assert problem.set_by == "--pin tp=3 --pin pp=5"
    (works,) = problem.suggestions
    pins = [*works.replace("--pin ", "").split(), "zero=0"]
    assert search(make_request("nano", cluster="8xh100", pins=pins)).best is not None


@pytest.mark.slow
def test_every_degree_that_is_offered_in_place_of_a_pin_works() -> None:
    error = _why(make_request("llama3-8b", cluster="8xh200", pins=["tp=3", "zero=1"]))
    (problem,) = error.problems
    assert len(problem.suggestions) > 2
    for text in problem.suggestions:
        pins = [text.removeprefix("--pin "), "zero=1"]
        assert search(make_request("llama3-8b", cluster="8xh200", pins=pins)).best is not None


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "cluster", "wanted"),
    [
        ("llama3-8b", "1xa100-40gb", {"2xa100-40gb", "1xa100-80gb", "1xh100"}),
        ("llama3-8b", "5xrtx4090", {"4xrtx4090"}),
        ("llama2-70b", "16xrtx4090", {"24xrtx4090", "8xh100"}),
        pytest.param("llama3-405b", "16xh100", {"40xh100"}, marks=pytest.mark.slow),
    ],
)
def test_what_is_told_plans_as_it_is_typed(model: str, cluster: str, wanted: set[str]) -> None:
    error = _why(make_request(model, cluster=cluster))
    assert error.exit_code == 1
    (problem,) = error.problems
    told = [_typed(text) for text in problem.suggestions]
    assert wanted <= {name for name, settings in told if not settings}
    assert told[0] == (_smallest(problem.suggestions, cluster), ())
    for name, settings in told:
        found = search(make_request(model, cluster=name or cluster, settings=settings))
        assert found.best is not None, (name, settings)


def _smallest(texts: Sequence[str], cluster: str) -> str:
    """Return the smallest of the clusters of the same devices that need no other change."""
    _, _, device = cluster.partition("x")
    same = [name for name, settings in map(_typed, texts) if not settings]
    counts = [int(one.partition("x")[0]) for one in same if one.partition("x")[2] == device]
    return f"{min(counts)}x{device}"


def _as_typed(
    model: str, cluster: str, pins: Sequence[str], text: str, settings: Sequence[str] = ()
) -> SearchRequest:
    """Return the request with what a suggestion says; a pin takes the place of the one before."""
    words = text.split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    named = {value.partition("=")[0] for flag, value in pairs if flag == "--pin"}
    kept = [pin for pin in pins if pin.partition("=")[0] not in named]
    return make_request(
        model,
        cluster=next((value for flag, value in pairs if flag == "--cluster"), cluster),
        pins=[*kept, *(value for flag, value in pairs if flag == "--pin")],
        settings=[*settings, *(value for flag, value in pairs if flag == "--set")],
    )


def _typed(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the cluster of a suggestion, and its settings."""
    words = text.split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    clusters = [value for flag, value in pairs if flag == "--cluster"]
    return "".join(clusters), tuple(value for flag, value in pairs if flag == "--set")


@pytest.mark.slow
def test_hosts_are_told_of_and_the_smallest_cluster_that_needs_none_is_beside() -> None:
    error = _why(make_request("llama3-8b", cluster="1xa100-40gb"))
    (problem,) = error.problems
    assert "with optimizer state on the host: 2xa100-40gb" in problem.message
    assert "--cluster 4xa100-40gb" in problem.suggestions
    pinned = _why(make_request("llama3-8b", cluster="1xa100-40gb", pins=["offload=none"]))
    assert pinned.problems[0].suggestions[0] == "--cluster 4xa100-40gb"


def test_common_devices_come_first_and_rare_ones_only_where_those_are_too_small() -> None:
    clusters = [
        _typed(text)[0]
        for text in _why(make_request("llama3-8b", cluster="1xa100-40gb")).problems[0].suggestions
    ]
    others = [name.partition("x")[2] for name in clusters if name and "a100-40gb" not in name]
    assert others == ["h100", "a100-80gb"] == list(common_devices()[:2])


@pytest.mark.slow
def test_the_cheapest_change_of_the_run_is_offered() -> None:
    short = "batch.sequence_length=2048"
    wide = ["precision.parameters=fp32", short]
    whole = make_request("llama3-8b", cluster="1xmi250x", settings=wide)
    changes = [text for text in _why(whole).problems[0].suggestions if "--cluster" not in text]
    assert changes == ["--set lora.rank=16", "--set precision.parameters=bf16"]
    for change in changes:
        new = change.removeprefix("--set ")
        rest = [text for text in wide if text.partition("=")[0] != new.partition("=")[0]]
        settings = [*rest, new]
        changed = make_request("llama3-8b", cluster="1xmi250x", settings=settings)
        assert search(changed).best is not None, change
    long = ["batch.sequence_length=32768"]
    error = _why(make_request("qwen3-4b", cluster="1xa100-40gb", settings=long))
    changes = [text for text in error.problems[0].suggestions if "--cluster" not in text]
    named = [text.partition("=")[0] for text in changes]
    assert named == ["--set lora.rank", "--set batch.sequence_length"]


def test_a_pinned_number_of_devices_is_told_with_the_cluster() -> None:
    error = _why(make_request("llama3-8b", cluster="1xa100-40gb", pins=["devices=1"]))
    first = error.problems[0].suggestions[0]
    assert first == "--cluster 2xa100-40gb --pin devices=2"
    assert search(make_request("llama3-8b", cluster="2xa100-40gb", pins=["devices=2"])).best


def _nothing_fits(request: SearchRequest) -> LeanestPlan:
    error = _why(request)
    assert isinstance(error, NothingFits)
    assert error.exit_code == 1
    assert error.leanest is not None
    return error.leanest


PINNED = ["zero=3", "tp=1", "pp=1", "cp=1", "microbatch=1", "recompute=full", "offload=none"]


def test_a_pinned_plan_that_does_not_fit_has_its_numbers() -> None:
    settings = ["batch.global_sequences=16", "batch.sequence_length=1024"]
    request = make_request("qwen3-32b", cluster="8xa800", pins=PINNED, settings=settings)
    error = _why(request)
    leanest = _nothing_fits(request)
    assert leanest.over_bytes == leanest.estimate.bytes_held - request.memory_bytes > 0
    assert sum(count for _, count in leanest.terms) == pytest.approx(leanest.estimate.bytes_held)
    assert leanest.terms[0][0] == "optimizer"
    (problem,) = error.problems
    for count in (leanest.estimate.bytes_held, request.memory_bytes, leanest.over_bytes):
        assert binary_bytes(count) in problem.message
    assert f"optimizer {binary_bytes(leanest.terms[0][1])}" in problem.message
    assert {"--pin offload=host", "--set lora.rank=16"} < {*problem.suggestions}
    assert any(text.startswith("--cluster ") for text in problem.suggestions)
    for fix in leanest.fixes:
        changed = _as_typed("qwen3-32b", "8xa800", PINNED, fix.flags, settings)
        assert search(replace(changed, top=1)).best is not None, fix.flags
        assert fix.saved_bytes > 0
        assert fix.time_ratio > 0


@pytest.mark.quick("pins1", "pins3")
@pytest.mark.parametrize("pins", [(), ("zero=0", "dp=8"), ("recompute=none",), ("offload=none",)])
def test_the_leanest_plan_is_the_leanest(pins: Sequence[str]) -> None:
    request = small(pins=pins, memory_gb=0.4)
    leanest = _nothing_fits(request)
    held = estimate_candidate(request, leanest.ranked.candidate).bytes_held
    less = request.with_memory(0.97 * held)
    assert best_fitting_plan(less) is None
    assert "offload=none" in pins or best_fitting_plan(less, offload=True) is None


def test_the_leanest_plan_survives_other_words() -> None:
    """`ec.plan` tells the same in keywords, and keeps the numbers."""
    with pytest.raises(NothingFits) as caught:
        ec.plan("llama3-8b", "1xa100-40gb", pins=["offload=none"])
    assert caught.value.leanest is not None
    assert 'cluster="4xa100-40gb"' in caught.value.problems[0].suggestions


def test_a_freed_pin_is_the_best_that_fits() -> None:
    pins = ["tp=1", "pp=1", "cp=1", "zero=0", "recompute=none", "microbatch=1"]
    room = search(replace(small(pins=pins), top=1)).first.estimate.bytes_held
    request = small(pins=pins).with_memory(0.8 * room)
    leanest = leanest_plan(search(request))
    assert leanest is not None
    freed = [fix for fix in leanest.fixes if fix.flags.startswith("--pin ")]
    assert freed
    for fix in freed:
        names = [change.partition("=")[0] for change in fix.changes]
        plans = search(request.without_pins(*names)).ranked
        assert fix.choice in [one.candidate for one in plans]
        assert fix.estimate.bytes_held <= request.memory_bytes
        assert fix.saved_bytes > 0
        ratio = fix.estimate.step_s / leanest.estimate.step_s
        assert fix.time_ratio == pytest.approx(ratio)


def test_more_devices_under_pins_are_as_few_as_do() -> None:
    """Not the next doubling: llama2-7b without hosts takes six of these, and two were tried."""
    request = make_request("llama2-7b", cluster="2xrtx4090", pins=["offload=none"])
    leanest = leanest_plan(search(request))
    assert leanest is not None
    fixes = {fix.changes: fix for fix in leanest.fixes}
    assert fixes[("2 -> 6 devices",)].devices == 6
    assert fixes[("2 -> 6 devices",)].flags == "--cluster 6xrtx4090"


def test_the_line_of_a_whole_plan_is_freed_word_by_word() -> None:
    whole = small(pins=("pp2 dp4, ZeRO 0, 1f1b, microbatches of 3",))
    request = whole.with_memory(0.98 * search(whole).first.estimate.bytes_held)
    leanest = leanest_plan(search(request))
    assert leanest is not None
    freed = [fix for fix in leanest.fixes if fix.flags.startswith("--pin ")]
    assert freed
    for fix in freed:
        assert all(before != after for before, after in map(_values, fix.changes)), fix.changes
        typed = [text.strip() for text in fix.flags.split("--pin ") if text]
        free = request.without_pins(*(text.partition("=")[0] for text in typed))
        values = {**free.pins.values, **read_pins(typed).values}
        assert search(replace(free, pins=replace(free.pins, values=values))).best, fix.flags
    assert request.pins.text("recompute") == "recompute=none"
    assert request.pins.typed["recompute"] == "--pin pp2 dp4, ZeRO 0, 1f1b, microbatches of 3"


def _values(change: str) -> tuple[str, str]:
    """Return the values of a pin before and after a change."""
    pin, _, after = change.partition(" -> ")
    return pin.partition("=")[2], after
