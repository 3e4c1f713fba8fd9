"""Bands hold what they claim: four of five runs that were not fitted; what is counted has none."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.predict import cases_of, predict_cases
from bench.accuracy.published.rows import read_rows
from echelon.planner.predict.bands import (
    ALLOCATORS,
    byte_term_bands,
    device_family,
    held_bytes_band,
    mfu_band,
    price_band,
    step_band,
    step_deviation,
    step_difference_band,
    step_term_bands,
    tokens_per_s_band,
)
from echelon.planner.predict.estimate import EXACT, Estimate
from echelon.planner.predict.residuals import HELD, LEFT_OUT, PAIRS, RUNS, STEP
from echelon.planner.search.request import SearchAim, make_request
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import SMALL

DATA = Path(__file__).parents[3] / "bench" / "data"


Run = Mapping[str, float | str]


@lru_cache(maxsize=1)
def _runs() -> tuple[Run, ...]:
    words = {"id", "sweep", "publisher", "trainer", "device"}
    with (DATA / "left_out.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            {key: cell if key in words else float(cell) for key, cell in row.items()}
            for row in csv.DictReader(file)
        )


@lru_cache(maxsize=4)
def _answer(cluster: str, trainer: str, settings: Sequence[str] = SMALL) -> SearchResult:
    aim = SearchAim(trainer=trainer, top=2)
    return search(
        make_request("nano", cluster=cluster, settings=settings, pins=["cp=1", "pp=1,2"], aim=aim)
    )


def _best(cluster: str, trainer: str, settings: Sequence[str] = SMALL) -> Estimate:
    best = _answer(cluster, trainer, settings).best
    assert best is not None
    return best.estimate


def _inside(run: Run, kind: str, off: float) -> bool:
    """Return whether a run was measured within so much of the logarithm of its prediction."""
    return abs(log(float(run["measured_s"]) / float(run[f"{kind}_s"]))) <= off


def _within_band(run: Run) -> bool:
    trainer, device = str(run["trainer"]), str(run["device"])
    return _inside(
        run, "publisher", step_deviation(trainer, device, experts=bool(float(run["experts"])))
    )


@pytest.mark.parametrize("column", ["trainer", "device"])
def test_four_of_five_runs_that_were_left_out_lie_in_the_band(column: str) -> None:
    """Of each trainer, and of each device, of which ten runs or more are known."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for run in _runs():
        if run["measured_s"]:
            groups[str(run[column])].append(_within_band(run))
    large = {name: inside for name, inside in groups.items() if len(inside) >= 10}
    assert len(large) >= 4
    shares = {name: sum(inside) / len(inside) for name, inside in large.items()}
    assert {name: share for name, share in shares.items() if not 0.76 <= share <= 0.84} == {}


@pytest.mark.parametrize("name", ["trainer", "device"])
def test_four_of_five_runs_of_what_was_left_out_lie_in_the_band(name: str) -> None:
    for kind, off in LEFT_OUT[name].items():
        runs = [
            run
            for run in _runs()
            if run["measured_s"] and bool(float(run["experts"])) == (kind == "experts")
        ]
        assert len(runs) == RUNS[kind]
        share = sum(_inside(run, name, off) for run in runs) / len(runs)
        assert 0.75 <= share <= 0.85


def test_four_of_five_memories_lie_in_the_band() -> None:
    runs = [run for run in _runs() if run["measured_gb"] and run["trainer"] in ALLOCATORS]
    assert len(runs) == RUNS["held"]
    off = [
        (float(run["measured_gb"]) - float(run["counted_gb"])) / float(run["estimated_gb"])
        for run in runs
    ]
    assert 0.75 <= np.mean([HELD[0] <= one <= HELD[1] for one in off]) <= 0.9
    assert {str(run["trainer"]) for run in runs} >= ALLOCATORS


def test_constants_of_the_package_keep_measured_runs_in_their_bands() -> None:
    """A sample of all runs, predicted as a user's plan would be: fitted runs are nearer."""
    rows = read_rows(DATA / "measured_runs.csv")[::12]
    cases, _ = cases_of(rows)
    told = [one for one in predict_cases(cases) if one.case and one.case.measured.step_s]
    inside: list[bool] = []
    for one in told:
        assert one.case is not None
        assert one.step_s is not None
        case, real = one.case, one.case.measured.step_s or 0.0
        experts = bool(np.asarray(case.model.experts) > 0)
        off = step_deviation(case.program.generation, device_family(case.machine), experts=experts)
        inside.append(abs(log(real / one.step_s)) <= off)
    assert len(inside) > 50
    assert sum(inside) / len(inside) >= 0.8


def test_every_number_has_its_band_and_what_is_counted_has_none() -> None:
    one = _best("16xa100-80gb", "megatron")
    step, held = step_band(one), held_bytes_band(one)
    off = STEP["dense"]["megatron"]["A100"]
    assert step.low <= exp(-off) * one.step_s
    assert step.high >= exp(off) * one.step_s
    assert step.low <= one.step_band[0]
    assert step.high >= one.step_band[1]
    for rate, value in (
        (tokens_per_s_band(one), one.tokens_per_s_per_device),
        (mfu_band(one), one.mfu),
    ):
        assert rate.value == value
        assert rate.low * step.high == pytest.approx(value * step.value)
        assert rate.high * step.low == pytest.approx(value * step.value)
    price = price_band(one, 2.0)
    assert price.high / price.value == pytest.approx(step.high / step.value)
    terms = step_term_bands(one)
    assert sum(amount.low for amount in terms.values()) <= step.low * (1 + 1e-9)
    for name, amount in byte_term_bands(one).items():
        assert (amount.low == amount.high) == (name in EXACT or not amount.value)
    assert held.low < one.bytes_held < held.high
    assert held.low > sum(one.bytes[name] for name in EXACT)


def test_two_plans_of_one_run_differ_by_what_pairs_of_a_sweep_did() -> None:
    first, second = (one.estimate for one in _answer("16xa100-80gb", "megatron").ranked)
    off = step_difference_band(first, second)
    assert off.low <= off.value <= off.high
    assert off.low <= np.exp(-PAIRS["near"]) * second.step_s - first.step_s
    assert not off.certain
    slow = replace(second, seconds={name: 3 * value for name, value in second.seconds.items()})
    assert step_difference_band(first, slow).certain
