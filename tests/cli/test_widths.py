"""Pages use the columns that a terminal has, from 60 to 160: no line is longer, no number cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli import doctor
from echelon.cli.main import main
from echelon.cli.output import page_columns

WIDTHS = (60, 80, 120, 160)  # columns
PAGES = (
    "plan llama3-8b --cluster 8xh100",
    "plan llama3-8b --cluster 8xh100 --pin pp=2 --detail",
    "plan nano --cluster 4xh100 --why",
    "plan nano",
    f"plan {Path(__file__).parents[2] / 'examples' / 'nano.toml'}",
    "explain",
    "explain tp-divides-heads",
    "explain zero --dp 4 --parameters 7e9 --memory-bytes 80GB",
    "explain pipeline --pp 4",
    "explain context",
    "explain context nano --set mesh.cp=2",
    "explain experts",
    "explain experts toy-experts",
    "explain choose nano --cluster 8xh100",
    "explain lints",
    "explain errata wrong",
    "explain memory llama2-7b --dp 4",
    "explain units nano --set cluster.preset=16xh100",
    "config show nano",
    "config show --cluster 16xh100",
    "config presets",
    "compare nano toy-experts",
    "compare nano llama3-8b-zero3",
)
CHANGES = re.compile(r"searched|legal plans in|^(stage|pp|rank) ?\d|#|\|", re.MULTILINE)
"""Lines that no two runs of a command share, and drawings, which are as wide as there is room."""


def page(
    typed: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return what a command prints on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(typed.split()) == 0
    return capsys.readouterr().out


def numbers(text: str) -> set[str]:
    """Return the numbers of a page, with their units where they stand together."""
    kept = "\n".join(line for line in text.splitlines() if not CHANGES.search(line))
    return set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?[A-Za-z]*", kept))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("typed", PAGES)
def test_no_line_is_longer_than_the_terminal_and_no_number_is_cut(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {columns: page(typed, columns, monkeypatch, capsys) for columns in WIDTHS}
    for columns, text in pages.items():
        longest = max(text.splitlines(), key=len)
        assert len(longest) <= columns, f"{columns}: {longest}"
        assert not [line for line in text.splitlines() if line != line.rstrip()]
    whole = numbers(pages[160])
    for columns, text in pages.items():
        assert numbers(text) == whole, columns
    heights = [text.count("\n") for text in pages.values()]
    assert heights == sorted(heights, reverse=True), "more columns never take more lines"


def test_columns_are_those_of_the_terminal_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, columns in (("20", 60), ("100", 100), ("400", 160)):
        monkeypatch.setenv("COLUMNS", typed)
        assert page_columns() == columns
    monkeypatch.delenv("COLUMNS")
    assert page_columns() == 80, "what is piped has no columns"
    assert page_columns(160) == 160


@pytest.mark.parametrize("columns", WIDTHS)
def test_what_doctor_finds_stays_within_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = "/a/long/folder/that/somebody/has/mounted " * 4
    found = doctor.MachineCheck(name="disk", text=f"{folder}has 3.5 GiB free")
    monkeypatch.setattr(doctor, "examine_machine", lambda _: iter([found]))
    text = page("doctor", columns, monkeypatch, capsys)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(text.split()) == f"ok disk {folder.strip()} has 3.5 GiB free"
    assert all(line.startswith(" " * 20) for line in lines[1:])
    assert (len(lines) > 4) == (columns == 60)


def test_wide_terminals_show_longer_values_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-model-with-a-name-of-forty-characters-x"
    run = tmp_path / "run.toml"
    run.write_text(f'extends = "nano"\n[model]\nname = "{name}"\n')
    shown = {n: page(f"compare nano {run}", n, monkeypatch, capsys) for n in (80, 160)}
    assert f"{name[:19]}..." in shown[80]
    assert name not in shown[80]
    assert name in shown[160]
