"""`echelon schedule`: what is proved of a file, where it is stuck, and how a schedule looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main

GOOD = "rank 0, F0.0, F0.1, BW0.0, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"
STUCK = "rank 0, F0.0, BW0.0, F0.1, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    return path


def test_check_prints_what_it_proved(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", str(file), "--most-in-flight", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}: proven"
    assert (
        "complete      8 actions: 2 microbatches cross 2 stages forward and backward, once each"
        in lines
    )
    assert "no deadlock   4 messages, used as they come; no cycle of waiting ranks" in lines
    assert "memory        within the limits" in lines
    assert lines[-1].split() == ["1", "1", "2", "2", "2"]


def test_check_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["command"], result["proven"]) == ("schedule check", True)
    assert result["peak_in_flight_per_rank"] == [2, 2]
    assert result["num_messages"] == 4


def test_a_deadlock_is_drawn_and_the_answer_is_no(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(STUCK)
    assert main(["schedule", "check", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out.startswith(f"{file}: NOT PROVEN\n\n+-> rank 0:  F0.0 [BW0.0] (F0.1) BW0.1\n")
    assert "cannot start F1.1 (row 2, column 3) before F0.1" in output.out
    assert output.err.startswith("error[schedule-cannot-deadlock]: 2 ranks wait in a circle")
    assert f"set by: {file}, row 1, column 3" in output.err
    assert "works here: on rank 1 BW1.0 before F1.1" in output.err


def test_a_deadlock_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(STUCK)
    assert main(["schedule", "check", str(file), "--json"]) == 1
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert output.err == ""
    assert result["proven"] is False
    assert [problem["rule"] for problem in result["problems"]] == ["schedule-cannot-deadlock"]
    assert [(wait["rank"], wait["action"], wait["waits_for"]) for wait in result["stuck"]] == [
        (0, "BW0.0", "BW1.0"),
        (1, "F1.1", "F0.1"),
    ]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (GOOD.replace("F0.1", ""), "schedule-covers-once"),
        (GOOD.replace("F1.0, F1.1", "F1.0, F1.1, F1.1"), "schedule-covers-once"),
        (GOOD.replace("BW1.1", "B1.1"), "schedule-covers-once"),
        (GOOD.replace("F0.0, F0.1, BW0.0, BW0.1", "BW0.0,F0.0,F0.1,BW0.1"), "schedule-keeps-order"),
        (GOOD + "rank 2, ,\n", "schedule-places-stages"),
        (GOOD + "rank 2, F999999.0\n", "schedule-covers-once"),
    ],
)
def test_a_wrong_schedule_exits_1_with_its_cell(
    file: Path, text: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["schedule", "check", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out.startswith(f"{file}: NOT PROVEN\n")
    assert output.err.startswith(f"error[{rule}]")
    assert f"set by: {file}, row " in output.err


SPLIT = (
    "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1",
    "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1",
)
"""Both stages split their backward."""


@pytest.mark.parametrize(
    ("rows", "rule", "text"),
    [
        ((SPLIT[0].replace(" W0.1", ""), SPLIT[1]), "schedule-covers-once", "W is missing"),
        (
            (SPLIT[0].replace(" W0.0", "").replace(" W0.1", ""), SPLIT[1]),
            "schedule-covers-once",
            "stage 0, microbatch 0: W is missing",
        ),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "schedule-covers-once", "W is missing"),
        ((f"{SPLIT[0]} W0.1", SPLIT[1]), "schedule-covers-once", "W0.1 appears 2 times"),
        (
            ("F0.0 F0.1 W0.0 B0.0 B0.1 W0.1", SPLIT[1]),
            "schedule-keeps-order",
            "needs B0.0, which is at",
        ),
        (
            (SPLIT[0].replace("W0.1", "W1.1"), SPLIT[1]),
            "schedule-covers-once",
            "W1.1, but stage 1 is on rank 1",
        ),
        (
            (SPLIT[0].replace("B0.1 W0.1", "BW0.1 W0.1"), SPLIT[1]),
            "schedule-covers-once",
            "BW appears with W",
        ),
    ],
)
def test_a_split_backward_needs_each_weight_gradient_once(
    rows: tuple[str, ...], rule: str, text: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("".join(f"{', '.join(row.split())}\n" for row in SPLIT))
    assert main(["schedule", "check", str(file)]) == 0
    file.write_text("".join(f"{', '.join(row.split())}\n" for row in rows))
    assert main(["schedule", "check", str(file)]) == 1
    printed = capsys.readouterr().err
    assert f"error[{rule}]" in printed
    assert text in printed


def test_a_limit_per_rank(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", str(file), "--most-in-flight", "2,1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error[schedule-within-memory]: rank 1 holds")
    assert f"set by: {file}, row 2, column 3      works here: --most-in-flight 2" in error


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["FILE", "--most-in-flight", "2,1,1"], "bad-argument"),
        (["FILE", "--most-in-flight", "-1"], "bad-argument"),
        (["FILE", "--most-in-flight", "two"], "bad-argument"),
        (["absent.csv"], "no-such-file"),
        (["."], "no-such-file"),
    ],
)
def test_what_cannot_be_read_exits_2(
    file: Path, arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(file) if word == "FILE" else word for word in arguments]
    assert main(["schedule", "check", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error[{rule}]")


def test_an_unknown_action_exits_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("F1.1", "G1.1"))
    assert main(["schedule", "check", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[schedule-action-known]: row 2, column 3: 'G1.1' is not")


def test_a_limit_is_checked_of_any_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "show", "gpipe", "-p", "2", "-m", "4", "--most-in-flight"]
    assert main([*command, "4"]) == 0
    assert main([*command, "3"]) == 2
    assert capsys.readouterr().err.startswith("error[schedule-within-memory]: rank 0")
