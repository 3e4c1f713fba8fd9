"""A request to stop: its effect in each phase, in imports, in callbacks, in other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from threading import Thread

import pytest

from echelon.launch.stop import (
    EXIT_INTERRUPTED,
    StopRequest,
    current_request,
    requests_held_back,
    stop_request,
)


def raise_signal(number: signal.Signals = signal.SIGINT) -> None:
    """Send this process a signal, whose handler runs before this returns."""
    signal.raise_signal(number)


def child(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that begins with a request to stop, `stop`, which takes all signals."""
    begin = """
        import os, signal, subprocess, sys, time
        from echelon.launch.stop import current_request, ignore_requests, requests_held_back
        from echelon.launch.stop import StopRequest
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop = StopRequest()
        stop.install()
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def heeded() -> Iterator[None]:
    """Heed SIGHUP, which tests inherit as ignored where nohup has started them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_at_work_a_request_is_one_line_and_an_interrupt(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop_request() as stop:
        with pytest.raises(KeyboardInterrupt):
            raise_signal(number)
        raise_signal(signal.SIGTERM)  # a launcher sends several
        assert (stop.received, stop.answered) == (number, False)
    assert capfd.readouterr() == ("", "interrupted\n")


def test_a_request_that_is_noted_is_raised_where_the_code_asks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stop_request() as stop:
        with pytest.raises(KeyboardInterrupt), stop.noted():  # noqa: PT012 - a block of several
            stop.check()
            raise_signal()
            stop.begin_answers()  # too late: it was said that nothing is kept
            with pytest.raises(KeyboardInterrupt):
                stop.check()
        with pytest.raises(KeyboardInterrupt), stop.noted():
            raise AssertionError("not even begun")
    assert capfd.readouterr().err == "interrupted\n"


def test_an_answered_request_interrupts_only_when_it_is_repeated(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stop_request() as stop:
        with stop.noted():
            stop.begin_answers()
            raise_signal(signal.SIGTERM)
            stop.check()
            raise_signal(signal.SIGTERM)
            assert (stop.received, stop.answered) == (signal.SIGTERM, True)
        with pytest.raises(KeyboardInterrupt):
            raise_signal(signal.SIGINT)
    first, second = capfd.readouterr().err.splitlines()
    assert first == "SIGTERM: stopping at the end of this step (Ctrl-C again ends at once)"
    assert second == "interrupted"


def test_ranks_of_a_launcher_hear_every_signal_as_one_request(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []
    with (
        stop_request() as stop,
        stop.answered_by(lambda: asked.append(1), line="", repeats=False),
    ):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            raise_signal(number)
    assert asked == [1]
    assert capfd.readouterr().err == ""


def test_one_object_takes_the_signals_and_gives_them_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_request() as stop:
        assert current_request() is stop
        with stop_request() as inner:
            assert inner is stop
        assert current_request() is stop
    assert current_request() is None
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_takes_no_signals() -> None:
    owners: list[StopRequest | None] = []

    def look() -> None:
        with stop_request():
            owners.append(current_request())

    thread = Thread(target=look)
    thread.start()
    thread.join()
    assert owners == [None]


def test_what_is_ignored_stays_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_request() as stop:
            raise_signal(signal.SIGHUP)  # nohup
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err == ""


def test_what_comes_while_a_process_is_started_comes_after() -> None:
    with stop_request() as stop:
        with pytest.raises(KeyboardInterrupt), requests_held_back():  # noqa: PT012 - at its end
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received is None
        assert stop.received is signal.SIGTERM


def test_a_process_that_is_started_so_hears_no_request() -> None:
    done = child("""
        code = (
            "import os, signal, sys; os.kill(os.getpid(), signal.SIGINT);"
            "from echelon.launch.stop import ignore_requests; ignore_requests();"
            "os.kill(os.getpid(), signal.SIGTERM); print('done')"
        )
        with requests_held_back():
            process = subprocess.Popen([sys.executable, "-c", code])
        sys.exit(process.wait())
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_forked_copy_ends_without_a_word() -> None:
    done = child("""
        pid = os.fork()
        if not pid:
            signal.raise_signal(signal.SIGTERM)
            print("it went on")
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{EXIT_INTERRUPTED}\n", "")


def test_a_second_ctrl_c_ends_what_cleans_up_too_long() -> None:
    done = child("""
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            print("it went on")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "interrupted\n")


def test_an_interrupt_that_a_callback_loses_is_raised_again() -> None:
    done = child("""
        class Thing:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)

        try:
            Thing()
            time.sleep(20)
            print("lost")
        except KeyboardInterrupt:
            print("raised")
    """)
    assert (done.stdout, done.stderr) == ("raised\n", "interrupted\n")


IMPORTS = """
        import importlib.abc, importlib.util, tempfile, pathlib
        folder = pathlib.Path(tempfile.mkdtemp())
        sys.path.insert(0, str(folder))
        (folder / "leaf.py").write_text("print('leaf')")
        (folder / "middle.py").write_text({middle!r})
        try:
            import middle
            print("imported")
            time.sleep(20)
            print("lost")
        except KeyboardInterrupt:
            print("raised")
"""


@pytest.mark.parametrize(
    ("middle", "printed"),
    [
        # Where one module imports the next, it is raised: the rest of the import is left.
        ("import os, signal\nsignal.raise_signal(signal.SIGINT)\nprint('on')\nimport leaf", "on\n"),
        # Where C begins the import (here by a builtin), it comes after the import.
        (
            "import signal\nsignal.raise_signal(signal.SIGINT)\nlist(map(__import__, ['leaf']))",
            "leaf\n",
        ),
        # A module that imports nothing more is loaded to its end.
        ("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('on')", "on\n"),
    ],
    ids=["python", "c", "leaf"],
)
def test_inside_of_an_import_it_is_raised_where_nothing_loses_it(middle: str, printed: str) -> None:
    done = child(IMPORTS.format(middle=middle))
    assert (done.returncode, done.stderr) == (0, "interrupted\n")
    assert done.stdout in (f"{printed}raised\n", f"{printed}imported\nraised\n")


def test_a_request_is_no_less_one_where_the_command_ends_before_it_is_raised() -> None:
    done = child(
        IMPORTS.format(middle="import signal\nsignal.raise_signal(signal.SIGINT)").replace(
            "time.sleep(20)", "stop.end_with(0)"
        )
    )
    assert done.stdout.splitlines()[-1] == "raised"


def test_after_the_end_every_request_ends_the_process_with_its_code() -> None:
    done = child("""
        stop.end_with(75)
        signal.raise_signal(signal.SIGTERM)
        print("it went on")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
