"""A run on local ranks: its logs, its signals, and how it ends.

The first test, and all that send signals, start the real fork server; the others fork one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, RunOutcome, run_ranks
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault
from tests.launch import targets

LABELS = ("pp0", "pp1")
ROOT = Path(__file__).parents[3]


def run(argument: dict[str, Any], log_dir: Path, **limits: float) -> RunOutcome:
    options = LaunchOptions(limits=Limits(**limits))
    return run_ranks(
        targets.train, argument, world_size=2, labels=LABELS, log_dir=log_dir, options=options
    )


@pytest.mark.slow
@pytest.mark.system("S51")
@pytest.mark.usefixtures("real_fork_server")
def test_a_run_returns_all_results_and_shows_the_first_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run_ranks(targets.talk, {}, world_size=2, log_dir=tmp_path)
    assert outcome.require() == (None, None)
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    for rank in range(2):
        assert (tmp_path / f"rank-{rank:04d}.log").read_text() == f"out {rank}\nerr {rank}\n"


@pytest.mark.slow
def test_a_slow_run_that_moves_is_not_ended(tmp_path: Path) -> None:
    outcome = run({"steps": 4, "pause": 0.6}, tmp_path, step_s=1.5)
    assert outcome.require() == ({"done": True}, {"done": True})
    assert not outcome.stop_requested


def test_others_say_for_whom_they_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run({"rank": 1, "how": "raise"}, tmp_path)
    with pytest.raises(RankFailure, match=r"rank 1 \(pp1\): ValueError: the loss of my life"):
        outcome.require()
    log = (tmp_path / "rank-0000.log").read_text()
    assert "rank 0 (pp0) stops for rank 1 (pp1): ValueError: the loss of my life" in log
    assert "Traceback" in (tmp_path / "rank-0001.log").read_text()
    assert capfd.readouterr().err == "rank 0 stopped for rank 1 (pp1)\n"


def test_a_user_error_is_raised_as_it_was() -> None:
    error = DataError(targets.BROKEN_FILE.problem("shard 3 is 12 bytes short"))
    fault = RankFault(rank=1, kind=FaultKind.RAISED, at=0.0, summary="DataError", error=error)
    with pytest.raises(DataError) as caught:
        RunOutcome(results=(), failure=RankFailure(fault, "pp1")).require()
    assert caught.value is error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_rank_whose_log_is_full_says_what_it_raised(tmp_path: Path) -> None:
    outcome = run({"rank": 1, "how": "raise-with-a-full-log"}, tmp_path)
    assert outcome.failure is not None
    assert outcome.failure.rules == ("rank-raised",)
    assert outcome.failure.fault.summary == "ValueError: the loss of my life"


def test_a_rank_that_raises_with_a_collective_in_flight_is_heard_at_once(tmp_path: Path) -> None:
    outcome = run_ranks(
        targets.raise_in_flight,
        {},
        world_size=2,
        labels=LABELS,
        log_dir=tmp_path,
        options=LaunchOptions(limits=Limits(step_s=2.0)),
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.rules) == (1, ("rank-raised",))


def test_a_rank_that_holds_its_interpreter_is_found(tmp_path: Path) -> None:
    outcome = run({"rank": 1, "how": "hold-interpreter"}, tmp_path, silent_s=1.5)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert outcome.failure.fault.kind is FaultKind.SILENT
    assert outcome.failure.rules == ("rank-stopped",)
    assert "in fail" in outcome.failure.fault.detail


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    options = LaunchOptions(limits=Limits(join_s=1.0))
    outcome = run_ranks(
        "tests.launch.local.slow_import:target",
        {},
        world_size=2,
        labels=LABELS,
        log_dir=tmp_path,
        options=options,
    )
    assert outcome.failure is not None
    assert outcome.failure.rules == ("rank-never-joined",)
    assert outcome.failure.rank == 1
    assert "slow_import.py" in outcome.failure.fault.detail


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} of this machine is in use") as e:
            run_ranks(targets.talk, {}, world_size=1, options=LaunchOptions(port=port))
    assert e.value.rules == ("port-in-use",)


def test_the_supervisor_does_without_torch() -> None:
    code = (
        "import sys, echelon.launch.local.supervisor, echelon.launch.local.supervisor;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


class Run:
    """A run in a process of its own, to which signals can be sent."""

    def __init__(self, directory: Path, *, answers: bool = True) -> None:
        argument = {"pids": str(directory), "pause": 0.05, "answers": answers}
        script = f"""
            import sys
            from echelon.core.errors import EchelonError
            from echelon.launch.local.supervisor import run_ranks
            try:
                outcome = run_ranks(
                    "tests.launch.targets:train", {argument!r}, world_size=2
                )
                print(outcome.stop_requested, outcome.require())
            except EchelonError as error:
                print(error.rules, error)
                sys.exit(error.exit_code)
            except KeyboardInterrupt:
                print("KeyboardInterrupt")
                sys.exit(130)
        """
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[psutil.Process]:
        """Wait until both ranks run and return them."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            texts = [path.read_text() for path in self.directory.iterdir()]
            if len(texts) == 2 and all(texts):
                return [psutil.Process(int(text)) for text in texts]
            time.sleep(0.05)
        raise AssertionError(self.process.communicate(timeout=5))


@pytest.mark.quick("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_stop_signal_becomes_a_request_to_all_ranks(
    tmp_path: Path, number: signal.Signals
) -> None:
    started = Run(tmp_path)
    started.ranks()
    started.process.send_signal(number)
    out, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 0, err
    assert out.startswith("True ({'stopped': ")
    assert f"{number.name}: stopping at the end of this step" in err


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    started = Run(tmp_path)
    ranks = started.ranks()
    for rank in ranks:
        rank.suspend()
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    started.process.send_signal(signal.SIGINT)
    out, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 130, err
    assert out == "KeyboardInterrupt\n"
    assert err.splitlines()[-1] == "interrupted"
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_request_that_no_rank_answers_ends_them_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    started = Run(tmp_path, answers=False)
    ranks = started.ranks()
    started.process.send_signal(number)
    out, err = started.process.communicate(timeout=30)
    assert started.process.returncode == 130, err
    assert (out, err) == ("KeyboardInterrupt\n", "interrupted\n")
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


KILLED = (
    "the process that forks ranks was killed by SIGKILL (kill -9, or the kernel for lack of memory)"
)


@pytest.mark.slow
def test_a_fork_server_that_is_killed_while_it_imports_is_said_to_be(tmp_path: Path) -> None:
    started = Run(tmp_path)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(started.process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(children[0].pid, signal.SIGKILL)
    out, _ = started.process.communicate(timeout=30)
    assert started.process.returncode == 4
    assert out.startswith(f"('launcher-lost',) error[launcher-lost]: {KILLED}\n")


@pytest.mark.quick("supervisor")
@pytest.mark.parametrize("whom", ["supervisor", "fork server"])
def test_no_rank_outlives_who_started_it(tmp_path: Path, whom: str) -> None:
    started = Run(tmp_path)
    ranks = started.ranks()
    ranks[0].suspend()
    if whom == "supervisor":
        started.process.kill()
    else:
        (fork_server,) = psutil.Process(started.process.pid).children()
        os.kill(fork_server.pid, signal.SIGKILL)
    out, _ = started.process.communicate(timeout=30)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    lost = f"('launcher-lost',) error[launcher-lost]: {KILLED}\n"
    assert out == "" if whom == "supervisor" else out.startswith(lost)
