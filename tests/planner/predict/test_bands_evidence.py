"""What a band rests on: four of five runs lie in it, and what no run tells makes it wider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import hypot, log
from pathlib import Path

import pytest

from echelon.config.cluster.file import cluster_toml
from echelon.config.cluster.settings import named_cluster
from echelon.core.cluster import Cluster
from echelon.cost.seconds.trainers import UNFITTED_FRAMEWORKS
from echelon.planner.predict.bands import (
    FAMILIES,
    LEAST_HELD_OUT,
    MEASURED_HERE,
    STEP_CONSTANTS,
    band_evidence,
    device_family,
    measured_factors,
    step_band,
    step_deviation,
    trainer_from_constants,
)
from echelon.planner.predict.estimate import Estimate
from echelon.planner.predict.residuals import HELD, LEFT_OUT, MOST_DEVICES, STEP, UNKNOWN
from echelon.planner.search.request import SearchAim, make_request
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import MIXTURE, SMALL


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


def test_what_no_run_tells_makes_a_band_wider() -> None:
    known, unknown = (_best("16xa100-80gb", name) for name in ("megatron", "generic"))
    assert trainer_from_constants(known.inputs.software) == "megatron"
    assert trainer_from_constants(unknown.inputs.software) is None
    assert device_family(known.inputs.machine) in FAMILIES.values()
    narrow, wide = band_evidence(known.inputs), band_evidence(unknown.inputs)
    assert narrow.untested == ()
    assert log(narrow.step[1]) == pytest.approx(STEP["dense"]["megatron"]["A100"])
    assert log(narrow.step[0]) == pytest.approx(-log(narrow.step[1]))
    assert wide.untested == ("its trainer",)
    assert wide.held[1] > HELD[1]
    layout = replace(known.inputs.layout, dp_shard=4.0 * MOST_DEVICES, offload=1.0)
    far = band_evidence(replace(known.inputs, layout=layout))
    assert far.untested == ("offload", f"more than {MOST_DEVICES:,} devices")
    assert far.step[1] > narrow.step[1]
    mixture = _best("16xa100-80gb", "megatron", MIXTURE)
    assert band_evidence(mixture.inputs).untested == ("its trainer on such devices with experts",)
    other = _best("16xmi250x", "megatron")
    assert band_evidence(other.inputs).untested == ("its device",)
    pair = _best("16xmi300x", "megatron")
    assert band_evidence(pair.inputs).untested == ("its trainer on such devices",)
    dense, experts = (step_deviation("megatron", "A100", experts=some) for some in (False, True))
    assert experts == max(each["experts"] for each in LEFT_OUT.values()) != dense


def test_nothing_known_is_as_far_off_as_both_together() -> None:
    trainer, device = (LEFT_OUT[name]["dense"] for name in ("trainer", "device"))
    assert step_deviation(None, None, experts=False) in (
        pytest.approx(hypot(trainer, device)),
        STEP["dense"].get(UNKNOWN, {}).get(UNKNOWN),
    )


def test_on_a_calibrated_machine_the_band_is_its_own() -> None:
    machine = _best("4xcpu", "echelon")
    assert set(band_evidence(machine.inputs).untested) == {"its trainer", "its device"}
    usual = UNFITTED_FRAMEWORKS["echelon"]
    constants = {name: 3.0 * float(getattr(usual, name)) for name in STEP_CONSTANTS}
    measured = replace(machine.inputs, software=replace(machine.inputs.software, **constants))
    assert band_evidence(measured).step == MEASURED_HERE
    assert band_evidence(measured).untested == ()
    # No step that is measured leaves optimizer state to a host.
    offloaded = band_evidence(replace(measured, layout=replace(measured.layout, offload=1.0)))
    assert offloaded.untested == ("offload",)
    assert offloaded.step[0] < MEASURED_HERE[0]
    assert offloaded.step[1] > MEASURED_HERE[1]


def test_a_calibration_that_is_farther_off_has_wider_bands(tmp_path: Path) -> None:
    cluster = named_cluster("4xcpu", "")
    assert isinstance(cluster, Cluster)
    plain = cluster_toml(cluster)
    bands: list[float] = []
    for error in (0.001, 0.05, 0.2):
        file = tmp_path / f"{error}.toml"
        file.write_text(f"{plain}\n[calibration.held_out]\nsteps = {error}\n")
        best = _best(str(file), "echelon")
        assert best.inputs.software.step_error == error
        band = step_band(best)
        bands.append(band.high / band.low)
        assert band.low < band.value < band.high
    assert bands[0] < bands[1] < bands[2]
    low, high = measured_factors(0.2)
    assert bands[2] == pytest.approx(high / low, rel=1e-6)
    # Four of five normal errors, whose mean is known of five steps.
    assert log(high) == pytest.approx(1.85 * log(1.2), rel=1e-3)
    assert measured_factors(0.001) == measured_factors(LEAST_HELD_OUT)
    told = band_evidence(best.inputs).similar_runs
    assert told == "this machine, calibrated, 20 % off at steps that it held out"
