"""Bands hold what they claim: four of five runs that were not fitted; what is counted has none."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.predict import cases_of, predict_cases
from bench.accuracy.rows import read_rows
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.planner.estimate import Estimate
from echelon.planner.explain.bands import (
    bytes_of,
    difference,
    held_of,
    mfu_of,
    price_of,
    step_of,
    terms_of,
    tokens_of,
)
from echelon.planner.explain.grounds import (
    ALLOCATORS,
    BY_STEPS,
    EXACT,
    FAMILIES,
    HERE,
    NODE,
    Factors,
    family_of,
    grounds_of,
    together,
    trainer_of,
)
from echelon.planner.request import Aim, make_request
from echelon.planner.residuals import EXPERTS, HELD, MOST_DEVICES, PAIRS, RUNS, STEP
from echelon.planner.search import Answer, search
from tests.planner.requests import MIXTURE, SMALL

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
def _answer(cluster: str, trainer: str, settings: Sequence[str] = SMALL) -> Answer:
    aim = Aim(trainer=trainer, top=2)
    return search(
        make_request("nano", cluster=cluster, settings=settings, pins=["cp=1", "pp=1,2"], aim=aim)
    )


def _best(cluster: str, trainer: str, settings: Sequence[str] = SMALL) -> Estimate:
    best = _answer(cluster, trainer, settings).best
    assert best is not None
    return best.estimate


def _covered(runs: Sequence[Run], kind: str, factors: Mapping[str, Factors]) -> float:
    """Return the share of runs that were measured inside of the band of their prediction."""
    inside: list[bool] = []
    for run in runs:
        low, high = factors["node" if float(run["devices"]) <= NODE else "nodes"]
        if float(run["experts"]):
            low, high = together((low, high), EXPERTS)
        inside.append(low <= float(run["measured_s"]) / float(run[f"{kind}_s"]) <= high)
    return sum(inside) / len(inside)


@pytest.mark.parametrize("kind", ["trainer", "device"])
def test_four_of_five_runs_of_what_was_left_out_lie_in_the_band(kind: str) -> None:
    runs = [run for run in _runs() if run["measured_s"]]
    assert len(runs) == RUNS[kind] + RUNS["experts"]
    assert 0.75 <= _covered(runs, kind, STEP[kind]) <= 0.9


def test_four_of_five_runs_of_another_publisher_lie_in_the_band() -> None:
    runs = [run for run in _runs() if run["measured_s"] and not run["experts"]]
    known = [
        run
        for run in runs
        if all(
            any(o[name] == run[name] and o["publisher"] != run["publisher"] for o in runs)
            for name in ("trainer", "device")
        )
    ]
    assert len(known) == RUNS["known"]
    assert 0.75 <= _covered(known, "publisher", STEP["known"]) <= 0.9


def test_four_of_five_memories_lie_in_the_band() -> None:
    runs = [run for run in _runs() if run["measured_gb"]]
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
        places = STEP["known"]
        low, high = places["node" if float(one.row.cells["n_gpus"]) <= NODE else "nodes"]
        inside.append(low <= (one.case.measured.step_s or 0.0) / one.step_s <= high)
    assert len(inside) > 50
    assert sum(inside) / len(inside) >= 0.8


def test_what_no_run_tells_makes_a_band_wider() -> None:
    known, unknown = (_best("16xa100-80gb", name) for name in ("megatron", "generic"))
    assert trainer_of(known.work.software) == "megatron"
    assert trainer_of(unknown.work.software) is None
    assert family_of(known.work.machine) in FAMILIES.values()
    narrow, wide = grounds_of(known.work), grounds_of(unknown.work)
    assert narrow.beyond == ()
    assert narrow.step == STEP["known"]["nodes"]
    assert wide.beyond == ("its trainer",)
    assert wide.step[0] <= narrow.step[0] < 1 < narrow.step[1] <= wide.step[1]
    assert wide.held[1] > HELD[1]
    layout = replace(known.work.layout, dp_shard=4.0 * MOST_DEVICES, offload=1.0)
    far = grounds_of(replace(known.work, layout=layout))
    assert far.beyond == ("offload", f"more than {MOST_DEVICES:,} devices")
    assert far.step[1] > wide.step[1]
    mixture = _best("16xa100-80gb", "megatron", MIXTURE)
    assert grounds_of(mixture.work).beyond == ("its experts (few runs)",)
    other = _best("16xb200", "megatron")
    assert grounds_of(other.work).beyond == ("its device",)


def test_on_a_calibrated_machine_the_band_is_its_own() -> None:
    machine = _best("4xcpu", "echelon")
    assert set(grounds_of(machine.work).beyond) == {"its trainer", "its device"}
    usual = FRAMEWORKS["echelon"]
    constants = {name: 3.0 * float(getattr(usual, name)) for name in BY_STEPS}
    measured = replace(machine.work, software=replace(machine.work.software, **constants))
    assert grounds_of(measured).step == HERE
    assert grounds_of(measured).beyond == ()


def test_every_number_has_its_band_and_what_is_counted_has_none() -> None:
    one = _best("16xa100-80gb", "megatron")
    step, held = step_of(one), held_of(one)
    assert step.low <= STEP["known"]["nodes"][0] * one.step_s
    assert step.high >= STEP["known"]["nodes"][1] * one.step_s
    assert step.low <= one.step_band.low
    assert step.high >= one.step_band.high
    for rate, value in ((tokens_of(one), one.tokens_per_s_per_device), (mfu_of(one), one.mfu)):
        assert rate.value == value
        assert rate.low * step.high == pytest.approx(value * step.value)
        assert rate.high * step.low == pytest.approx(value * step.value)
    price = price_of(one, 2.0)
    assert price.high / price.value == pytest.approx(step.high / step.value)
    terms = {term.name: term.amount for term in terms_of(one)}
    assert sum(amount.low for amount in terms.values()) <= step.low * (1 + 1e-9)
    for term in bytes_of(one):
        amount = term.amount
        assert (amount.low == amount.high) == (term.name in EXACT or not amount.value)
    assert held.low < one.bytes_held < held.high
    assert held.low > sum(one.bytes[name] for name in EXACT)


def test_two_plans_of_one_run_differ_by_what_pairs_of_a_sweep_did() -> None:
    first, second = (one.estimate for one in _answer("16xa100-80gb", "megatron").ranked)
    off = difference(first, second)
    assert off.low <= off.value <= off.high
    assert off.low <= np.exp(-PAIRS["near"]) * second.step_s - first.step_s
    assert not off.certain
    slow = replace(second, seconds={name: 3 * value for name, value in second.seconds.items()})
    assert difference(first, slow).certain
