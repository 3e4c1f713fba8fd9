"""A pipeline that cannot be is refused by `echelon plan` with the same rule, and before a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echelon.cli.main import main

GOOD = "rank 0, F0.0, F0.1, BW0.0, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"
TWO = ["batch.global_sequences=4", "batch.microbatch_sequences=2"]
"""Two microbatches, as the file has."""
ONE_MICROBATCH = ["batch.global_sequences=2", "batch.microbatch_sequences=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which the command is typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rules_of(capsys: pytest.CaptureFixture[str], *sets: str) -> list[str]:
    """Return the rules by which `echelon plan` refuses these settings, on two pipeline ranks."""
    ranks = [] if any(one.startswith("mesh.pp=") for one in sets) else ["mesh.pp=2"]
    flags = [word for one in (*ranks, *sets) for word in ("--set", one)]
    assert main(["plan", "nano", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("old", "new", "rule", "checked"),
    [
        ("F0.1,", "", "schedule-covers-once", 1),
        ("F1.1,", "F1.1, F1.1,", "schedule-covers-once", 1),
        ("F0.0, F0.1, BW0.0", "BW0.0, F0.0, F0.1", "schedule-keeps-order", 1),
        ("F1.1", "G1.1", "schedule-action-known", 2),
        ("F0.1, BW0.0", "BW0.0, F0.1", "schedule-cannot-deadlock", 1),
        ("rank 1", "rank 7", "schedule-rows-are-ranks", 2),
        ("rank 1, F1.0, F1.1, BW1.0, BW1.1\n", "rank 1, ,\n", "schedule-places-stages", 1),
    ],
)
def test_a_wrong_file_is_refused_by_the_same_rule_in_a_run(
    old: str,
    new: str,
    rule: str,
    checked: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert old in GOOD
    (folder / "mine.csv").write_text(GOOD.replace(old, new))
    assert main(["schedule", "check", "mine.csv"]) == checked
    assert re.findall(r"^error\[([a-z-]+)\]", capsys.readouterr().err, re.MULTILINE) == [rule]
    file = ["pipeline.schedule=file", "pipeline.file=mine.csv"]
    assert rules_of(capsys, *file, *TWO) == [rule]


def test_a_file_over_its_memory_limit_is_refused_in_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.csv").write_text(GOOD)
    file = ["pipeline.schedule=file", "pipeline.file=mine.csv", "pipeline.most_in_flight=1"]
    assert set(rules_of(capsys, *file, *TWO)) == {"schedule-within-memory"}


@pytest.mark.parametrize(
    ("sets", "rules"),
    [
        ([*ONE_MICROBATCH], ["schedule-needs-microbatches"]),
        (["mesh.pp=8"], ["layers-fill-stages"]),
        (["pipeline.stages=[[0,1],[2]]"], ["stages-cover-layers"]),
        (["pipeline.stages=[[0,1],[1,2,3]]"], ["stages-cover-layers"]),
        (["pipeline.stages=[[0,1],[3,2]]"], ["stages-cover-layers"]),
        (["pipeline.stages=[[0,1],[2,3,4]]"], ["stages-cover-layers"]),
        (["pipeline.stages=[[0,1,2,3]]"], ["stages-match-mesh"]),
        (["pipeline.stages=[2,2]"], ["wrong-type"]),
        (
            [
                "pipeline.schedule=interleaved-1f1b",
                "pipeline.virtual_stages=2",
                *ONE_MICROBATCH,
            ],
            ["schedule-needs-microbatches"],
        ),
        (
            [
                "pipeline.schedule=dualpipe",
                "batch.global_sequences=10",
                "batch.microbatch_sequences=2",
            ],
            ["schedule-even-microbatches"],
        ),
        (["mesh.pp=3", "pipeline.schedule=dualpipe"], ["schedule-even-ranks"]),
        (["pipeline.schedule=zbh1"], ["schedule-known"]),
        (["mesh.pp=0"], ["degree-at-least-one"]),
        (["mesh.pp=-2"], ["degree-at-least-one"]),
        (["pipeline.virtual_stages=0"], ["out-of-range"]),
        (["pipeline.schedule=file"], ["missing-setting"]),
        (["pipeline.schedule=file", "pipeline.file=absent.csv"], ["no-such-file"]),
        (["pipeline.schedule=file", "pipeline.file=."], ["no-such-file"]),
        (["pipeline.file=absent.csv"], ["no-effect"]),
        (["pipeline.times=absent.json"], ["no-such-file"]),
    ],
)
def test_a_wrong_setting_is_one_error(
    sets: list[str], rules: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rules_of(capsys, *sets) == rules


def test_errors_as_json_say_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "nano", "--set", "mesh.pp=2", "--set", "pipeline.stages=[[0,1],[2]]"]
    assert main([*words, "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    works = problem["works"][0].replace(" = ", "=")
    assert main([*words[:-1], works]) == 0
