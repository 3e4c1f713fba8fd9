"""Published runs that were read after the others: whole rows, none of them twice, all readable."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from bench.accuracy.predict import OK, predict
from bench.accuracy.published.measured import RESULTS
from bench.accuracy.published.rows import read_rows

DATA = Path(__file__).resolve().parents[3] / "bench" / "data"
FURTHER, MEASURED = DATA / "further_runs.csv", DATA / "measured_runs.csv"


def table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        return list(reader.fieldnames or ()), list(reader)


def test_columns_are_those_of_the_measured_runs() -> None:
    assert table(FURTHER)[0] == table(MEASURED)[0]


def test_ids_are_unique_and_not_those_of_the_measured_runs() -> None:
    ids = Counter(row["id"] for row in table(FURTHER)[1])
    others = {row["id"] for row in table(MEASURED)[1]}
    assert [name for name, times in ids.items() if times > 1 or name in others] == []


def test_no_run_is_a_copy_of_a_measured_one() -> None:
    told = ("id", "source", "year", "compile_fusion_notes", "completeness")

    def facts(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(value for name, value in row.items() if name not in told)

    others = {facts(row) for row in table(MEASURED)[1]}
    assert [row["id"] for row in table(FURTHER)[1] if facts(row) in others] == []


@pytest.mark.parametrize("column", ["id", "source", "model", "gpu", "n_gpus", "framework"])
def test_every_row_says(column: str) -> None:
    assert [row["id"] for row in table(FURTHER)[1] if not row[column].strip()] == []


def test_every_row_has_a_result_and_whole_devices() -> None:
    for row in table(FURTHER)[1]:
        assert any(float(row[column] or 0) > 0 for column in RESULTS), row["id"]
        assert int(row["n_gpus"]) > 0, row["id"]


def test_degrees_multiply_to_the_devices() -> None:
    for row in table(FURTHER)[1]:
        degrees = [row[name] for name in ("dp", "tp", "pp", "cp")]
        if all(degrees):
            dp, tp, pp, cp = map(int, degrees)
            assert dp * tp * pp * cp == int(row["n_gpus"]), row["id"]


def test_every_row_is_predicted_or_refused_by_a_rule() -> None:
    found = predict(read_rows(FURTHER))
    assert len(found) == len(table(FURTHER)[1])
    for one in found:
        if one.status == OK:
            assert one.step_s is not None, one.row.id
            assert one.step_s > 0, one.row.id
        else:
            assert one.message, one.row.id
