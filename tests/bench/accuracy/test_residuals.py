"""Runs that were left out: what is kept of them, and that the package's quantiles are theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.accuracy import residuals
from bench.accuracy.fit import priors, unfitted
from bench.accuracy.predict import Case, cases_of
from bench.accuracy.published.rows import read_rows
from bench.accuracy.residuals import LeftOut, left_out, read_left_out, write_left_out
from echelon.cost.fit.solver import ConstantValues

DATA = Path(__file__).parents[3] / "bench" / "data"


def test_the_module_is_what_the_command_writes() -> None:
    rows = read_left_out(DATA / "left_out.csv")
    assert residuals.module_text(rows) == residuals.MODULE.read_text(encoding="utf-8")
    assert residuals.measured_text(rows) == residuals.MEASURED.read_text(encoding="utf-8")


def _run(name: str, publisher: str, measured_s: float, **other: float) -> LeftOut:
    sizes = {"parameters": 7e9, "tokens": 4096.0}
    values = {"devices": 16.0, "experts": 0.0, "measured_gb": 0.0} | sizes
    return LeftOut(
        id=name,
        sweep=publisher,
        publisher=publisher,
        trainer="t",
        device="d",
        measured_s=measured_s,
        publisher_s=1.0,
        trainer_s=1.0,
        device_s=1.0,
        counted_gb=1.0,
        estimated_gb=1.0,
        **(values | other),
    )


def test_a_long_sweep_does_not_speak_for_all() -> None:
    many = [_run(f"a{n}", "a", 1.0) for n in range(100)]
    few = [_run(f"b{n}", "b", 2.0) for n in range(4)]
    runs = [(run, run.measured_s) for run in (*many, *few)]
    low, high = residuals.factors(runs)
    assert low == 1.0
    assert high > 1.5


def test_few_runs_of_a_trainer_on_a_device_are_judged_with_others() -> None:
    runs = [replace(_run(f"a{n}", "a", 1.1), trainer="a") for n in range(10)]
    runs += [replace(_run(f"b{n}", "b", 1.5), trainer="b", device=f"d{n % 2}") for n in range(12)]
    runs += [replace(_run(f"c{n}", "c", 1.3), trainer=f"c{n}") for n in range(3)]
    found = residuals.deviations(runs)
    assert found["a"]["d"] == pytest.approx(0.095, abs=2e-3)
    assert found["b"] == {"d0": found["b"]["d1"], "d1": pytest.approx(0.405, abs=2e-3)}
    assert found["c0"]["d"] == found["c2"]["d"] == pytest.approx(0.262, abs=2e-3)


def test_runs_of_one_size_are_one_line_of_the_measured_runs() -> None:
    runs = [_run("a1", "a", 1.0), _run("a2", "a", 2.0, parameters=8e9, tokens=4000.0)]
    runs += [_run("b1", "b", 1.0, experts=8.0), _run("c1", "c", 0.0, devices=512.0)]
    assert residuals.measured_text(runs).splitlines() == [
        "trainer,device,experts,parameters,devices,tokens",
        "t,d,0,8589934592,16,4096",
        "t,d,1,8589934592,16,4096",
    ]


def test_pairs_are_of_one_sweep() -> None:
    found = residuals.pairs(
        [
            *(_run("a1", "a", 1.0), _run("a2", "a", 1.1), _run("b1", "b", 9.0)),
            *(replace(_run("c1", "c", 2.0), publisher_s=2.0), _run("c2", "c", 1.0)),
        ]
    )
    assert found["near"] == pytest.approx(0.095, abs=2e-3)
    assert found["far"] == 0.0


def test_what_is_left_out_leaves_nothing_in_a_constant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases, _ = cases_of(read_rows(DATA / "measured_runs.csv")[::60])
    for case in map(unfitted, cases):
        before = priors()[case.program.generation]
        assert case.software.width_bytes == before.width_bytes
        assert case.software.reduce_overlap == before.reduce_overlap
    seen: list[set[str]] = []

    def refit(some: list[Case], start: ConstantValues | None = None) -> ConstantValues:
        if start is None:
            return {"begin": 1.0}
        assert start == {"begin": 1.0}
        seen.append({case.row.id for case in some})
        return {}

    monkeypatch.setattr(residuals, "refit", refit)
    rows = [*left_out(cases)]
    names = {kind: {row.id: getattr(row, kind) for row in rows} for kind in residuals.KINDS}
    groups = {
        frozenset(row.id for row in rows if names[kind][row.id] == name)
        for kind in residuals.KINDS
        for name in names[kind].values()
    }
    assert len(seen) == len(groups)
    assert all(any(not one & group for one in seen) for group in groups)
    write_left_out(tmp_path / "left.csv", rows)
    again = read_left_out(tmp_path / "left.csv")
    assert [row.id for row in again] == [row.id for row in rows]
    assert again[0].publisher_s == pytest.approx(rows[0].publisher_s, rel=1e-4)
    assert all(row.counted_gb > 0 < row.estimated_gb for row in rows)
