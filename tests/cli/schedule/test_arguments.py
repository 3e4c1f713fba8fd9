"""What `echelon schedule` is given and cannot use: one error each, and what works when typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.schedule.build import build_schedule
from echelon.schedule.files import read_schedule_file, schedule_csv

GOOD = "rank 0, F0.0, F0.1, BW0.0, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"
NUMBERS = {
    "schema": 2,
    "name": "mine",
    "num_ranks": 1,
    "num_microbatches": 1,
    "stage_ranks": [0],
    "mirrored": [],
    "actions": ["F0.0 BW0.0"],
}
"""A schedule as Echelon writes it."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which the command is typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """Return what a command that ends with 2 says is wrong."""
    assert main([*words, "--json"]) == 2
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)["problems"]


def test_a_schedule_with_millions_of_empty_slots_is_written_without_them(folder: Path) -> None:
    schedule = build_schedule("naive", num_stages=256, num_ranks=256, num_microbatches=17)
    text = schedule_csv(schedule)
    assert len(text) < 200_000
    (folder / "naive.csv").write_text(text)
    assert read_schedule_file(folder / "naive.csv").schedule.actions == schedule.actions


@pytest.mark.parametrize("times", ["1e-9,0,0", "0.5,0.25,0.25", "1e9,1e-9,0", "0,0,1e-3,1e9"])
def test_odd_times_are_drawn(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "1f1b", "-p", "2", "-m", "2", "--slots", times]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "rank 1  " in output.out


@pytest.mark.parametrize(
    ("names", "rules", "works"),
    [
        ("new.svg there.csv", ["never-overwrite"], [None, "there-2.csv"]),
        ("same new.csv", ["bad-argument"], ["same.svg", None]),
        ("same.csv ./folder/../same.csv", ["bad-argument"], None),
        ("folder new.csv", ["bad-argument"], ["folder.svg", None]),
        ("new.pdf new.csv", ["bad-argument"], ["new.svg", None]),
        ("new.svg absent/new.csv", ["cannot-write"], [None, "new.csv"]),
        (f"new.svg {'a' * 300}.csv", ["cannot-write"], [None, f"{'a' * 100}.csv"]),
        ("absent/a.svg there.csv", ["cannot-write", "never-overwrite"], ["a.svg", "there-2.csv"]),
    ],
)
def test_no_file_is_written_where_one_cannot_be(
    names: str,
    rules: list[str],
    works: list[str | None] | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "there.csv").write_text(GOOD)
    (folder / "folder").mkdir()
    before = sorted(folder.rglob("*"))
    words = ["schedule", "show", "1f1b", "-p", "2", "-m", "2"]
    given = names.split()
    flags = [word for name in given for word in ("--out", name)]
    found = problems(capsys, *words, *flags)
    assert [problem["rule"] for problem in found] == rules
    assert sorted(folder.rglob("*")) == before
    if works is None:
        return
    assert [problem["works"][0] for problem in found] == [f"--out {one}" for one in works if one]
    flags = [
        word
        for name, instead in zip(given, works, strict=True)
        for word in ("--out", instead or name)
    ]
    assert main([*words, *flags]) == 0
    assert (folder / "there.csv").read_text() == GOOD


def test_a_file_that_is_shown_is_refused_with_its_cells(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = GOOD.replace("F1.0, F1.1, BW1.0", "F1.0, BW1.0, F1.0")
    (folder / "mine.csv").write_text(wrong)
    shown = problems(capsys, "schedule", "show", "mine.csv")
    assert main(["schedule", "check", "mine.csv", "--json"]) == 1
    checked = json.loads(capsys.readouterr().out)["problems"]
    assert shown == checked
    assert shown[0]["set_by"] == "mine.csv, row 2, column 4"
    assert "place" not in shown[0]["message"]


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("empty.csv", b"", "schedule-file-readable"),
        ("comment.csv", b"# nothing\n", "schedule-file-readable"),
        ("binary.csv", b"\x93\xff\x00F0.0", "schedule-file-readable"),
        ("binary.json", b"\x93\xff\x00", "schedule-file-readable"),
        ("zeros.csv", b"a\0b,F0.0", "schedule-action-known"),
        ("mistyped.csv", b"F0.0,BW0-0", "schedule-action-known"),
        ("empty.json", b"", "schedule-file-readable"),
        ("cut.json", b'{"schema": 2', "schedule-file-readable"),
        ("number.json", b"3", "schedule-file-readable"),
        ("null.json", b"null", "schedule-file-readable"),
        ("table.json", b'{"rank 0": "F0.0"}', "schedule-file-readable"),
        ("rows.json", b"[1, 2]", "schedule-file-readable"),
        ("cells.json", b'[["F0.0", 3]]', "schedule-file-readable"),
        ("absent.csv", None, "no-such-file"),
        (".", None, "no-such-file"),
        ("absent/absent.csv", None, "no-such-file"),
    ],
)
def test_what_is_no_schedule_is_one_error(
    command: str,
    name: str,
    content: bytes | None,
    rule: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    assert main(["schedule", command, name]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE) == [rule]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_ranks": 10**9}, "schedule-places-stages"),
        ({"num_ranks": 0}, "schedule-places-stages"),
        ({"num_ranks": -3}, "schedule-places-stages"),
        ({"num_microbatches": 10**9}, "schedule-covers-once"),
        ({"num_microbatches": -5}, "schedule-places-stages"),
        ({"stage_ranks": [10**12]}, "schedule-places-stages"),
        ({"mirrored": [7]}, "schedule-places-stages"),
        ({"num_ranks": 10**30}, "schedule-file-readable"),
        ({"num_ranks": "1"}, "schedule-file-readable"),
        ({"actions": 7}, "schedule-file-readable"),
        ({"schema": 1}, "schedule-file-readable"),
    ],
)
@pytest.mark.parametrize("limit", [[], ["--most-in-flight", "4"]])
def test_numbers_that_cannot_be_are_refused_before_anything_counts_to_them(
    change: dict[str, object],
    rule: str,
    limit: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "mine.json").write_text(json.dumps(NUMBERS | change))
    code = main(["schedule", "check", "mine.json", *limit])
    output = capsys.readouterr()
    assert code == (2 if rule == "schedule-file-readable" else 1)
    assert output.err.startswith(f"error[{rule}]")
    assert main(["schedule", "show", "mine.json", *limit]) == 2
    assert capsys.readouterr().err.startswith(f"error[{rule}]")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["check"], "bad-argument"),
        (["check", "a.csv", "b.csv"], "bad-argument"),
        (["check", "a.csv", "--limit", "3"], "unknown-flag"),
        (["show"], "bad-argument"),
        (["show", "1f1b", "-p", "four", "-m", "8"], "bad-argument"),
        (["show", "1f1b", "-p", "4", "-m", "8", "--out"], "bad-argument"),
        (["show", "zbh1", "-p", "4", "-m", "8"], "schedule-known"),
        (["chek", "a.csv"], "unknown-command"),
    ],
)
def test_wrong_words_are_one_error(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE) == [rule]
