"""Measurements are there as soon as they are made, go on where they stopped, and never mix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.config.files.measurements import (
    Journal,
    measurement_name,
    num_measurements,
    unfinished_file,
    unfinished_measurements,
)
from echelon.core.errors import ConfigError
from echelon.cost.fit.samples import Collective, LaunchKernel, MatmulKernel

HERE = {"hosts": ("a",), "ranks": 2}
KERNEL = measurement_name(MatmulKernel(rows=2, depth=3, columns=4), running=2)
OTHER = measurement_name(LaunchKernel(name="add"), running=2)


def test_a_name_tells_a_measurement_from_all_others() -> None:
    samples = [
        MatmulKernel(rows=2, depth=3, columns=4),
        MatmulKernel(rows=2, depth=3, columns=4, batch=2),
        Collective(kind="send", degree=2, num_bytes=4),
        Collective(kind="send", degree=2, num_bytes=4, stride=2),
    ]
    names = [measurement_name(one, running=running) for one in samples for running in (1, 2)]
    assert len(set(names)) == 8
    assert all("\n" not in name for name in names)


def test_what_was_measured_is_found_again_and_gone_once_finished(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with unfinished_measurements(out, HERE) as first:
        assert first.found == {}
        first.journal.append(KERNEL, 0.5)
        assert num_measurements(unfinished_file(out)) == 1
    with unfinished_measurements(out, HERE) as second:
        assert second.found == {KERNEL: 0.5}
        second.journal.append(OTHER, 0.25)
    with unfinished_measurements(out, HERE) as third:
        assert third.found == {KERNEL: 0.5, OTHER: 0.25}
        third.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_was_cut_off_is_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with unfinished_measurements(out, HERE) as first:
        first.journal.append(KERNEL, 0.5)
    with unfinished_file(out).open("a") as stream:
        stream.write('{"measured": {"kind": "Launch')
    with unfinished_measurements(out, HERE) as second:
        assert second.found == {KERNEL: 0.5}
        second.journal.append(OTHER, 0.25)
    lines = unfinished_file(out).read_text().splitlines()
    assert [json.loads(line).get("seconds") for line in lines] == [None, 0.5, 0.25]


def test_without_a_measurement_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with pytest.raises(ZeroDivisionError), unfinished_measurements(out, HERE):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def _refused(out: Path, machine: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught, unfinished_measurements(out, machine):
        pass
    assert caught.value.rules == ("calibration-continued",)
    (problem,) = caught.value.problems
    assert f"rm {unfinished_file(out)}" in problem.suggestions
    return problem.message


def test_measurements_of_another_machine_are_told_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with unfinished_measurements(out, HERE) as first:
        first.journal.append(KERNEL, 0.5)
    before = unfinished_file(out).read_bytes()
    told = _refused(out, {"hosts": ("b",), "ranks": 4})
    assert told.endswith("begun otherwise: hosts ['a'] there, ['b'] here; ranks 2 there, 4 here")
    assert unfinished_file(out).read_bytes() == before


@pytest.mark.parametrize(
    "text", ["mine\n", "[1]\n", '{"schema": 9, "machine": {}}\n', '{"schema": 1}\nx\n', "\xff\n"]
)
def test_another_file_of_this_name_is_told_and_left(tmp_path: Path, text: str) -> None:
    out = tmp_path / "cluster.toml"
    unfinished_file(out).write_text(text + "more\n", encoding="latin-1")
    _refused(out, HERE)
    assert unfinished_file(out).read_text(encoding="latin-1") == text + "more\n"


def test_two_calibrations_do_not_write_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with unfinished_measurements(out, HERE) as first:
        first.journal.append(KERNEL, 0.5)
        assert "another calibration" in _refused(out, HERE)
        assert num_measurements(unfinished_file(out)) == 1


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot-write"),
        unfinished_measurements(tmp_path / "none" / "cluster.toml", HERE),
    ):
        pass
    assert num_measurements(tmp_path / "none") == 0


def test_ranks_of_other_processes_write_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    Journal(path).append(OTHER, 1.0)
    assert json.loads(path.read_text()) == {"measured": json.loads(OTHER), "seconds": 1.0}
