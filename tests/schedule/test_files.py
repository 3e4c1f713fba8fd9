"""Schedules in files: what is read, what is refused with its cell, and the way there and back."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import ConfigError, EchelonError, InfeasiblePlan
from echelon.core.rulebook import pipeline as rulebook
from echelon.core.rules import Rule
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.files import read_schedule_file, schedule_csv
from tests.schedule.examples import mirrored_schedules
from tests.schedule.mutations import is_valid

EXAMPLE = """\
# 1F1B on two ranks

rank 0, F0.0, F0.1,       , BW0.0,      , BW0.1
rank 1,     , F1.0, BW1.0 , F1.1 , BW1.1,         # the last rank
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


def _read(folder: Path, text: str, name: str = "mine.csv") -> Schedule:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_schedule_file(path).schedule


def _refused(folder: Path, text: str, name: str = "mine.csv") -> EchelonError:
    with pytest.raises(EchelonError) as caught:
        _read(folder, text, name)
    return caught.value


def _same(found: Schedule, schedule: Schedule) -> bool:
    """Return whether two schedules run the same; a mirror may be told from either side."""
    pairs = product(range(schedule.num_stages), range(schedule.num_microbatches))
    return (
        (found.num_ranks, found.num_stages, found.num_microbatches, found.actions)
        == (
            schedule.num_ranks,
            schedule.num_stages,
            schedule.num_microbatches,
            schedule.actions,
        )
    ) and all(found.rank_of(*pair) == schedule.rank_of(*pair) for pair in pairs)


def test_a_csv_has_a_row_per_rank_and_names_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(EXAMPLE)
    found = read_schedule_file(path)
    rows = [" ".join(map(str, row)) for row in found.schedule.actions]
    assert rows == ["F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]
    assert found.schedule.name == "mine"
    assert found.schedule.stage_ranks == (0, 1)
    assert found.cells.at(0, 2) == "row 3, column 5"
    assert found.cells.file_at(1, 0) == f"{path}, row 4, column 3"
    assert found.cells.file_at(1) == f"{path}, row 4"
    check_schedule(found.schedule, cells=found.cells)


@pytest.mark.parametrize(
    "text",
    [
        "F0.0,F0.1,BW0.0,BW0.1\nF1.0,F1.1,BW1.0,BW1.1",
        "F0.0;F0.1;;BW0.0;BW0.1\nF1.0;F1.1;BW1.0;BW1.1\n",
        "F0.0\tF0.1\tBW0.0\tBW0.1\r\nF1.0\tF1.1\tBW1.0\tBW1.1\r\n",
        "F0.0 F0.1 BW0.0 BW0.1\n\n\nF1.0 F1.1, ,BW1.0 BW1.1\n",
        "\ufeffrank 0,F0.0 F0.1,BW0.0 BW0.1\nRank 1:,F1.0 F1.1,BW1.0 BW1.1",
        "rank 1: F1.0 F1.1 BW1.0 BW1.1\nrank 0: F0.0 F0.1 BW0.0 BW0.1",
        '"rank 0","F0.0","F0.1","BW0.0 BW0.1"\n"rank 1",F1.0,F1.1,"BW1.0","BW1.1"\n',
        '["F0.0 F0.1 BW0.0 BW0.1", ["F1.0", null, "F1.1", "", "BW1.0 BW1.1"]]',
        '["rank 1: F1.0 F1.1 BW1.0 BW1.1", ["rank 0", "F0.0 F0.1 BW0.0", "BW0.1"]]',
    ],
)
def test_the_forms_that_a_schedule_may_have(folder: Path, text: str) -> None:
    found = _read(folder, text, "mine")
    assert (
        found.actions
        == build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=2).actions
    )


@pytest.mark.slow
@given(schedule=mirrored_schedules)
def test_csv_and_json_there_and_back(folder: Path, schedule: Schedule) -> None:
    assert _same(_read(folder, schedule_csv(schedule), "random.csv"), schedule)
    assert _read(folder, schedule.to_json(), "random.json") == schedule
    rows = [" ".join(map(str, row)) for row in schedule.actions]
    assert _same(_read(folder, json.dumps(rows)), schedule)
    cells = [[str(action) for action in row] for row in schedule.actions]
    assert _same(_read(folder, json.dumps(cells)), schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_the_same_from_its_csv(folder: Path, name: str) -> None:
    builder = SCHEDULES[name]
    stages = builder.stages_for(4, builder.default_virtual_stages)
    schedule = build_schedule(name, num_stages=stages, num_ranks=4, num_microbatches=8)
    assert _read(folder, schedule_csv(schedule), f"{name}.csv") == schedule


def test_a_csv_has_a_column_per_slot(folder: Path) -> None:
    schedule = build_schedule("zb-h1", num_stages=2, num_ranks=2, num_microbatches=2)
    lines = schedule_csv(schedule).splitlines()
    assert lines[0] == "# zb-h1: 2 ranks, 2 microbatches"
    assert [line.split(",")[0] for line in lines[1:]] == ["rank 0", "rank 1"]
    first, second = (line.split(",") for line in lines[1:])
    assert first[1:3] == ["F0.0", "F0.1"]
    assert second[1:4] == ["    ", "F1.0", "B1.0"]


@pytest.mark.parametrize(
    ("rows", "rule", "says", "where"),
    [
        (
            "rank 0,F0.0,F0.1,BW0.0\nrank 1,F1.0,F1.1,BW1.0,BW1.1",
            "schedule-covers-once",
            "stage 0, microbatch 1: BW (or B and W) is missing (rank 0)",
            "row 1",
        ),
        (
            "rank 0,F0.0,F0.1,BW0.0,BW0.1\nrank 1,F1.0,F1.1,BW1.0,BW1.1,BW1.0",
            "schedule-covers-once",
            "BW1.0 appears 2 times, not once: rank 1, row 2, column 4; rank 1, row 2, column 6",
            "row 2, column 6",
        ),
        (
            "rank 0,F0.0,F0.1,BW0.0,BW0.1,F1.1\nrank 1,F1.0,BW1.0,BW1.1",
            "schedule-covers-once",
            "rank 0, row 1, column 6: F1.1, but stage 1 is on rank 1",
            "row 1, column 6",
        ),
        (
            "rank 0,F0.0,BW0.1,F0.1,BW0.0\nrank 1,F1.0,F1.1,BW1.0,BW1.1",
            "schedule-keeps-order",
            "rank 0: BW0.1 at row 1, column 3 needs F0.1, which is at row 1, column 4",
            "row 1, column 3",
        ),
        (
            "rank 0,F0.0,F0.1,BW0.0,BW0.1\nrank 1,F1.0,F1.1,BW1.0,B1.1",
            "schedule-covers-once",
            "stage 1, microbatch 1: W is missing (rank 1)",
            "row 2",
        ),
        (
            "# stuck\nrank 0,F0.0,BW0.0,F0.1,BW0.1\nrank 1,F1.0,F1.1,BW1.0,BW1.1",
            "schedule-cannot-deadlock",
            "rank 0 cannot start BW0.0 (row 2, column 3) before BW1.0 (row 3, column 4) on rank 1",
            "row 2, column 3",
        ),
        ("F0.0,BW0.0\n,,,\n", "schedule-places-stages", "rank 1 owns no stage", "row 2"),
    ],
)
def test_what_is_wrong_names_the_cell(
    tmp_path: Path, rows: str, rule: str, says: str, where: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    found = read_schedule_file(path)
    with pytest.raises(InfeasiblePlan) as caught:
        check_schedule(found.schedule, cells=found.cells)
    problem = caught.value.problems[0]
    assert problem.rule == rule
    assert says in problem.message
    assert problem.set_by == f"{path}, {where}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank 0,F0.0\nrank 0,BW0.0", "row 2 is rank 0, and so is row 1"),
        ("rank 0,F0.0\nBW0.0", "row 2 does not say which rank it is"),
        ("rank 0,F0.0\nrank 2,BW0.0", "row 2 is rank 2, but 2 rows are ranks 0 to 1"),
    ],
)
def test_rows_that_are_no_ranks(folder: Path, text: str, says: str) -> None:
    error = _refused(folder, text)
    assert set(error.rules) == {"schedule-rows-are-ranks"}
    assert says in str(error)
    assert error.problems[0].set_by.endswith("row 2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no row in it"),
        ("# only a comment\n", "there is no row in it"),
        ("[]", "there is no row in it"),
        ('{"rows": []}', "a schedule has the entries"),
        ("[1]", "row 1 is neither a list of cells nor one text"),
        ('[["F0.0", 3]]', "row 1, cell 2 is not a text"),
        ('["F0.0"', "Expecting"),
        ("[" * 100_000, "its brackets"),
        ('{"actions": "F0.0"}', "a list with one row per rank"),
        ('{"num_microbatches": 9999999999}', "num_microbatches is more than"),
    ],
)
def test_what_is_no_schedule_at_all(folder: Path, text: str, says: str) -> None:
    error = _refused(folder, text)
    assert isinstance(error, ConfigError)
    assert error.rules == ("schedule-file-readable",)
    assert says in str(error)


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "image.csv").write_bytes(b"F0.0,\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_schedule_file(tmp_path / "image.csv")
    for name in ("imgae.csv", "no/such.csv", ".", "a\0b"):
        with pytest.raises(ConfigError) as caught:
            read_schedule_file(tmp_path / name)
        assert caught.value.rules == ("no-such-file",)
    with pytest.raises(ConfigError) as caught:
        read_schedule_file(tmp_path / "imgae.csv")
    assert caught.value.problems[0].suggestions == (str(tmp_path / "image.csv"),)


def test_a_stage_beyond_all_actions_is_refused_before_anything_counts_to_it(folder: Path) -> None:
    error = _refused(folder, "F0.0,BW0.0,F999999999.0")
    assert error.rules == ("schedule-covers-once",)
    assert "row 1, column 3: F999999999.0 is of a stage above 2" in str(error)
    found = _read(folder, "F0.0,BW0.0,F0.999999999")
    with pytest.raises(InfeasiblePlan):
        check_schedule(found)


WORDS = st.sampled_from(
    [
        *("F0.0", "BW0.0", "F1.0", "B1.0", "W1.0", "BW1.0", "F0.1", "F9.9"),
        *("rank 0", "rank 1", "rank", "[", "]", "{", "null", "x"),
        *(" ", ",", ";", "\n", '"', "#", "\t", "\r", "\u2028", "\0"),
    ]
)


@given(text=st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=25).map("".join)))
def test_any_text_is_a_schedule_or_refused_by_rule(folder: Path, text: str) -> None:
    try:
        (folder / "any.csv").write_text(text, encoding="utf-8", newline="")
    except UnicodeEncodeError:
        return
    try:
        found = read_schedule_file(folder / "any.csv")
        check_schedule(found.schedule, cells=found.cells)
    except EchelonError:
        return
    assert is_valid(found.schedule)


@pytest.mark.parametrize(
    "rule",
    [
        rulebook.SCHEDULE_FILE_READABLE,
        rulebook.SCHEDULE_ACTION_KNOWN,
        rulebook.SCHEDULE_ROWS_ARE_RANKS,
        rulebook.SCHEDULE_WITHIN_MEMORY,
    ],
    ids=lambda rule: rule.id,
)
def test_the_examples_of_the_rules(folder: Path, rule: Rule) -> None:
    with pytest.raises(EchelonError) as caught:
        check_schedule(_read(folder, rule.bad), most_in_flight=(1,))
    assert rule.id in caught.value.rules
    found = _read(folder, rule.fixed)
    check_schedule(found, most_in_flight=(1,) * found.num_ranks)
