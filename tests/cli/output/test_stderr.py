"""Notes, `-q` and `-v`, and the line that says how far long work is."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from threading import Event

import pytest

from echelon.cli import output as stderr
from echelon.cli.main import main
from echelon.cli.output import loudness, note, split_loudness, working
from echelon.core.messages.notes import NOTES, PROGRESS

CLEAR = "\r\x1b[2K"


class _Stream(io.StringIO):
    """A stream that is a terminal or none, and tells of every flush."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.flushed = terminal, Event()

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushed.set()


@pytest.fixture
def stream_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], _Stream]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)

    def make(terminal: bool) -> _Stream:
        stream = _Stream(terminal=terminal)
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    return make


def test_a_terminal_has_one_line_that_is_taken_away(
    stream_of: Callable[[bool], _Stream],
) -> None:
    stream = stream_of(True)
    with loudness("normal"), working("searching", after_s=0.0):
        PROGRESS.info("1 plans of 8 ranks")
        stream.flushed.clear()
        assert stream.flushed.wait(60)
        stream.flushed.clear()
        assert stream.flushed.wait(60)
    shown = stream.getvalue()
    assert "\n" not in shown
    assert "searching: 1 plans of 8 ranks" in shown
    assert shown.endswith(CLEAR)


def test_elsewhere_a_line_is_printed_at_first_and_every_few_seconds(
    stream_of: Callable[[bool], _Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "LINE_EVERY_S", 0.05)
    stream = stream_of(False)
    with loudness("normal"), working("proving", after_s=0.0):
        while stream.getvalue().count("\n") < 3:
            assert stream.flushed.wait(60)
            stream.flushed.clear()
            PROGRESS.info("2 ranks run 8 steps")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("proving ...")
    assert lines[-1].startswith("proving: 2 ranks run 8 steps, ")


@pytest.mark.parametrize("reason", ["short work", "--quiet", "--json", "another rank", "dumb"])
def test_nothing_is_shown_of(
    reason: str, stream_of: Callable[[bool], _Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(reason in ("short work", "dumb"))
    if reason == "another rank":
        monkeypatch.setenv("RANK", "3")
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    loud = "quiet" if reason == "--quiet" else "normal"
    lines = reason not in ("--json", "dumb")
    after_s = 3600.0 if reason == "short work" else 0.0
    with loudness(loud), working("searching", lines=lines, after_s=after_s):
        PROGRESS.info("half of it")
    assert stream.getvalue() == ""


def test_work_that_forks_shows_its_line_without_a_thread(
    stream_of: Callable[[bool], _Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Thread.start", lambda _: pytest.fail("a thread is started"))
    stream = stream_of(False)
    with loudness("normal"), working("rehearsing", forks=True, after_s=0.0):
        PROGRESS.info("1 ranks rehearsed")
    assert stream.getvalue() == "rehearsing: 1 rank rehearsed\n"


def test_the_line_goes_where_work_fails(stream_of: Callable[[bool], _Stream]) -> None:
    stream = stream_of(True)

    def fail() -> None:
        with loudness("normal"), working("searching", after_s=0.0):
            assert stream.flushed.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert stream.getvalue().endswith(CLEAR)
    assert PROGRESS.handlers == []


def test_flags_of_loudness_stand_anywhere_but_behind_two_dashes() -> None:
    assert split_loudness(["-q", "plan", "nano"]) == (["plan", "nano"], {"quiet"})
    assert split_loudness(["plan", "nano", "--verbose"]) == (["plan", "nano"], {"verbose"})
    assert split_loudness(["plan", "--", "-q"]) == (["plan", "--", "-q"], set())


def test_quiet_silences_notes_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    loud, quiet = (
        ["plan", "nano", "--set", "train.steps=3"],
        ["-q", "plan", "nano", "--set", "train.steps=3"],
    )
    assert main(loud) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("optimizer.warmup_steps = 3, adapted to train.steps = 3")
    assert len(shown.err.splitlines()) == 1
    assert main(quiet) == 0
    assert capsys.readouterr() == (shown.out, "")
    assert main([*quiet, "--set", "mesh.tp=3"]) == 2
    assert "error[tp-divides-heads]" in capsys.readouterr().err
    assert NOTES.handlers == []
    assert NOTES.level == logging.NOTSET


def test_verbose_adds_files_origins_seconds_and_where_an_error_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "nano", "-v", "--set", "mesh.tp=2"]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert "read the preset nano" in shown
    assert "mesh.tp = 2, --set mesh.tp=2" in shown
    assert "batch.global_sequences = 16, preset nano" in shown
    assert "peak memory" in shown[-1]
    assert main(["-v", "plan", "nano", "--set", "mesh.tp=3"]) == 2
    error = capsys.readouterr().err
    assert "in resolve" in error
    assert "error[tp-divides-heads]" in error


def test_quiet_and_verbose_are_not_both_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-q", "plan", "nano", "-v"]) == 2
    assert "error[bad-argument]: --quiet and --verbose" in capsys.readouterr().err


def test_notes_of_another_rank_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with loudness("normal"):
        logging.getLogger("echelon.config.load").warning("adapted")
        note("said by the command itself")
    assert capsys.readouterr().err == "said by the command itself\n"
