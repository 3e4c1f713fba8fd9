"""What a plan takes: its terms are shared out by size, and add up to the step and the bytes."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.units import gib
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.planner.report.estimate import (
    byte_terms,
    estimate_json,
    rate_lines,
    seconds_terms,
    terms_beside,
)
from echelon.planner.view.text_layout import data_text

MEMORY = 80e9


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    settings = ("cluster.preset=8xh100", "mesh.tp=8", "precision.parameters=bf16")
    return estimate_plan(load_job("llama3-8b", settings).plan)


def shares(table: str) -> list[float]:
    """Return the last column of a table, in percent."""
    return [float(line.split()[-2]) for line in table.splitlines()[1:]]


def test_shares_fall_and_add_up_to_the_last_one(estimate: Estimate) -> None:
    for table, whole in (
        (data_text(seconds_terms(estimate)), 100.0),
        (data_text(byte_terms(estimate, MEMORY)), 100 * estimate.bytes_held / MEMORY),
    ):
        *parts, total = shares(table)
        assert total == pytest.approx(whole, abs=0.05)
        assert sum(parts) == pytest.approx(total, abs=0.05 * (len(parts) + 1))
        named = parts[:-1] if "all others" in table else parts
        assert named == sorted(named, reverse=True)
        assert len(table.splitlines()[-1].split("sum (")) == 2


def test_what_is_counted_has_no_band_and_what_is_estimated_lies_in_its_own(
    estimate: Estimate,
) -> None:
    (counted,) = (
        line
        for line in data_text(byte_terms(estimate, MEMORY)).splitlines()
        if line.startswith("parameters")
    )
    assert " - " in counted
    found = estimate_json(estimate)
    assert sum(found["seconds"].values()) == pytest.approx(found["step_s"])
    assert sum(found["bytes"].values()) == pytest.approx(found["held_bytes"])
    for name, band in (("step_s", "step_band_s"), ("mfu", "mfu_band")):
        low, high = found[band]
        assert low < found[name] < high


def test_lines_begin_with_names_of_one_width_and_fit(estimate: Estimate) -> None:
    lines = "\n".join(rate_lines(estimate, label=9)).splitlines()
    names = [line[:9].strip() for line in lines]
    assert [name for name in names if name] == ["step", "rate", "memory", "bands"]
    behind = [line for line, name in zip(lines, names, strict=True) if not name]
    assert all(line.startswith(" " * 9) for line in behind)
    assert f" {100 * estimate.mfu:.1f} (" in lines[1]
    beside = terms_beside(estimate, MEMORY)
    assert max(map(len, [*lines, *beside.splitlines()])) <= 80
    assert beside.count("sum (step)") == beside.count("sum (memory)") == 1


def test_the_allocators_numbers_stand_beside_the_drivers(estimate: Estimate) -> None:
    found = estimate_json(estimate)
    held = found["bytes"]
    assert found["allocated_bytes"] == pytest.approx(
        sum(size for name, size in held.items() if name not in ("slack", "context", "nccl"))
    )
    assert found["reserved_bytes"] == pytest.approx(found["allocated_bytes"] + held["slack"])
    outside = held["context"] + held["nccl"]
    assert found["held_bytes"] == pytest.approx(found["reserved_bytes"] + outside)
    line = list(rate_lines(estimate))[2]
    assert f"; of it {gib(found['allocated_bytes'])} allocated, " in line
    assert line.endswith(f" {gib(found['reserved_bytes'])} reserved")


def test_a_processor_has_no_memory_of_a_driver() -> None:
    plan = load_job("nano", ("cluster.preset=4xcpu",)).plan
    assert "allocated" not in list(rate_lines(estimate_plan(plan)))[2]
