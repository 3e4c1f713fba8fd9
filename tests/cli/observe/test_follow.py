"""`echelon observe RUN --follow`: a line for a pipe, lines drawn over the last for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.observe import follow_run
from echelon.telemetry.live import ASCII, UNICODE
from tests.page.documents.test_run import steps, written


class Terminal(io.StringIO):
    """Be a terminal with an encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


def grown(path: Path, *counts: int) -> Callable[[float], None]:
    """Return a wait that lets the run take so many steps, one count at a time."""
    whole = steps(counts[-1]).splitlines(keepends=True)
    left = list(counts)

    def wait(_: float) -> None:
        (path / "metrics.jsonl").write_text("".join(whole[: left.pop(0) + 1]))

    return wait


def test_a_pipe_gets_a_line_for_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "")
    assert follow_run(path, wait=grown(path, 1, 1, 3, 5)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("step 0/300", "step 1/5", "step 3/5", "step 5/5"),
    ]


@pytest.mark.parametrize(
    ("encoding", "term", "marks"),
    [
        ("utf-8", "xterm", UNICODE),
        ("ascii", "xterm", ASCII),
        ("latin-1", "xterm", ASCII),
        ("utf-8", "linux", ASCII),
    ],
)
def test_a_terminal_has_curves_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, term: str, marks: str
) -> None:
    terminal = Terminal(encoding)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "44")
    path = written(tmp_path, "")
    assert follow_run(path, wait=grown(path, 2, 5)) == 0
    first, second, third = terminal.getvalue().split("\x1b[J")
    # It goes back over as many lines as it drew.
    assert first.endswith("\x1b[1F")
    assert second.endswith("\x1b[3F")
    assert second.count("\n") == third.count("\n") == 3
    assert all(len(line) <= 43 for line in third.splitlines())
    drawn = third.splitlines()[1]
    assert drawn.startswith(f"loss     {marks[-1]}")
    assert drawn.endswith(f"{marks[0]}  5 to 1")


def test_a_finished_run_is_shown_once_and_ctrl_c_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, steps(3))
    assert main(["observe", str(path), "--follow"]) == 0
    assert capsys.readouterr().out.startswith("step 3/3  loss 1.667")

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    (path / "metrics.jsonl").write_text("".join(steps(3).splitlines(keepends=True)[:3]))
    with pytest.raises(KeyboardInterrupt):  # the end of the run was not seen
        follow_run(path, wait=interrupted)


@pytest.mark.parametrize("other", [["--schedule"], ["--json"], ["--out", "a.html"], ["--serve"]])
def test_it_is_one_question(
    other: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", str(written(tmp_path, steps(2))), "--follow", *other]) == 2
    assert "bad-argument" in "".join(capsys.readouterr())


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["observe", str(tmp_path), "--follow"]) == 2
    assert "error[run-exists]" in capsys.readouterr().err
