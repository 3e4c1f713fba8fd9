"""Ranks as processes, forked by a server that is made up: what is started, heard and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem, RunFailed
from echelon.launch.gpus import GPU_DEFAULTS
from echelon.launch.local import rank_processes
from echelon.launch.local.messages import (
    Channel,
    ForkServerReady,
    ProcessExited,
    RankSlot,
    RankStarted,
    channel_pair,
)
from echelon.launch.local.rank_processes import RankProcess, RankProcesses, listen_on_port

pytestmark = pytest.mark.usefixtures("real_fork_server")


class MadeUpServer:
    """A thread that starts `sleep` for each rank, as the fork server forks ranks."""

    def __init__(self, descriptor: int, *, problem: str, most: int) -> None:
        """Serve at a copy of `descriptor`; after `most` ranks the server ends."""
        self.control = Channel(socket.socket(fileno=os.dup(descriptor)))
        self.problem, self.most = problem, most
        self.slots: list[RankSlot] = []
        self.environment: Mapping[str, str] = {}
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        """Answer until the other side is gone."""
        with contextlib.suppress(EOFError, OSError):
            self.control.send(ForkServerReady(self.problem))
            while True:
                slot, descriptors = self.control.receive_with_descriptors(2)
                assert isinstance(slot, RankSlot)
                child = subprocess.Popen(["sleep", "60"], pass_fds=descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                self.slots.append(slot)
                if len(self.slots) > self.most:
                    child.kill()
                    child.wait()
                    break
                self.control.send(RankStarted(slot.rank, child.pid))
                threading.Thread(target=self.tell_end, args=[child]).start()
        self.control.close()

    def tell_end(self, child: subprocess.Popen[bytes]) -> None:
        """Tell how a child ended."""
        code = child.wait()
        with contextlib.suppress(OSError):
            self.control.send(ProcessExited(child.pid, code))

    def poll(self) -> int | None:
        """Return its exit code, as a process does."""
        return None if self.thread.is_alive() else 0

    def kill(self) -> None:
        """End by itself: the other side is gone."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the thread."""
        self.thread.join(timeout)
        return 0


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[MadeUpServer]:
    """Put made-up servers in the place of fork servers; return those that were started."""
    return serve(monkeypatch)


def serve(
    monkeypatch: pytest.MonkeyPatch, *, problem: str = "", most: int = 99
) -> list[MadeUpServer]:
    """Make up servers."""
    started: list[MadeUpServer] = []

    def start(
        descriptor: int, environment: Mapping[str, str], preloaded: Sequence[str]
    ) -> MadeUpServer:
        assert preloaded in ((), ("json",))
        assert environment["OMP_NUM_THREADS"]
        started.append(MadeUpServer(descriptor, problem=problem, most=most))
        started[-1].environment = environment
        return started[-1]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rank_processes, "start_fork_server", start)
    return started


def hear_ends(processes: RankProcesses) -> None:
    """Listen until all ranks have ended."""
    while any(rank.exit_code is None for rank in processes.ranks):
        list(processes.listen(0.1, len(processes.ranks)))


def test_ranks_stay_and_more_are_added(servers: list[MadeUpServer], tmp_path: Path) -> None:
    with RankProcesses(3, tmp_path, shown_rank=1) as processes:
        processes.ensure(2)
        first = [rank.pid for rank in processes.ranks]
        processes.ensure(3)
        assert [rank.pid for rank in processes.ranks][:2] == first
        (server,) = servers
        assert [(slot.rank, slot.shown) for slot in server.slots] == [
            (0, False),
            (1, True),
            (2, False),
        ]
        assert {slot.environment["MASTER_PORT"] for slot in server.slots} == {
            str(processes.store_port)
        }
        assert server.slots[2].log_path == str(tmp_path / "rank-0002.log")
    assert processes.ranks == []
    assert server.poll() == 0


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_on_gpus_get_the_environment_for_them(
    servers: list[MadeUpServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
) -> None:
    for one in GPU_DEFAULTS:
        monkeypatch.delenv(one.name, raising=False)
    with RankProcesses(1, tmp_path, backend=backend) as processes:
        processes.ensure(1)
        (server,) = servers
    on_gpus = backend == "nccl"
    given = [one.name in server.environment for one in GPU_DEFAULTS]
    assert given == [on_gpus] * len(GPU_DEFAULTS)
    dumps = server.slots[0].environment.get("TORCH_FR_DUMP_TEMP_FILE")
    assert dumps == (f"{tmp_path}/nccl-rank-" if on_gpus else None)


def test_the_fork_server_may_begin_before_the_ranks(
    servers: list[MadeUpServer], tmp_path: Path
) -> None:
    with RankProcesses(2, tmp_path, preloaded=("json",)) as processes:
        processes.begin()
        processes.begin()
        (server,) = servers
        assert server.slots == []
        list(processes.listen(5.0, 2))  # it says that it is ready, and nobody has asked yet
        processes.ensure(2)
        assert servers == [server]
        assert len(server.slots) == 2


def test_after_the_end_of_one_all_are_started_anew(
    servers: list[MadeUpServer], tmp_path: Path
) -> None:
    with RankProcesses(2, tmp_path) as processes:
        processes.ensure(2)
        first = {rank.pid for rank in processes.ranks}
        processes.ranks[1].signal(signal.SIGKILL)
        while processes.ranks[1].exit_code is None:
            list(processes.listen(0.1, 2))
        assert processes.ranks[1].exit_code == -signal.SIGKILL
        processes.ranks[1].signal(signal.SIGKILL)  # it has ended: nothing is sent
        processes.ensure(2)
        assert first.isdisjoint(rank.pid for rank in processes.ranks)
        processes.discard(after_s=0.0)
        assert processes.ranks == []
    assert len(servers) == 1


def test_a_server_that_cannot_fork_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, problem="cannot import torch: no such module")
    with (
        RankProcesses(1, tmp_path) as processes,
        pytest.raises(EnvironmentProblem, match="cannot import torch") as caught,
    ):
        processes.ensure(1)
    assert caught.value.rules == ("launcher-lost",)


def test_a_server_that_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(monkeypatch, most=1)
    with RankProcesses(2, tmp_path) as processes:
        with pytest.raises(RunFailed, match="forks ranks exited with code 0") as caught:
            processes.ensure(2)
        assert caught.value.rules == ("launcher-lost",)
        with pytest.raises(RunFailed, match="forks ranks exited with code 0"):
            hear_ends(processes)
        os.kill(processes.ranks[0].pid, signal.SIGKILL)


def test_a_server_that_ends_before_a_rank_is_asked_for_is_no_broken_pipe(
    servers: list[MadeUpServer], tmp_path: Path
) -> None:
    with RankProcesses(2, tmp_path) as processes:
        processes.ensure(1)
        ready = processes._ready_fork_server()  # pyright: ignore[reportPrivateUsage]
        (server,) = servers
        with socket.socket(fileno=os.dup(server.control.fileno())) as control:
            control.shutdown(socket.SHUT_RDWR)
        server.thread.join()
        os.kill(processes.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match="forks ranks exited with code 0"):
            processes._spawn(ready, 1, None)  # pyright: ignore[reportPrivateUsage]


def test_what_is_raised_while_processes_start_ends_them(
    monkeypatch: pytest.MonkeyPatch, servers: list[MadeUpServer], tmp_path: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        RankProcesses(1, tmp_path, each_wait=stop) as processes,
    ):
        processes.ensure(1)
    (server,) = servers
    assert server.poll() == 0


def test_a_server_that_is_too_slow_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, servers: list[MadeUpServer], tmp_path: Path
) -> None:
    """It has not ended: no exit code is told."""

    def stay_silent(server: MadeUpServer) -> None:
        with contextlib.suppress(EOFError, OSError):
            server.control.receive(60.0)
        server.control.close()

    monkeypatch.setattr(MadeUpServer, "serve", stay_silent)
    monkeypatch.setattr(rank_processes, "_START_TIMEOUT_S", 0.1)
    with (
        RankProcesses(1, tmp_path) as processes,
        pytest.raises(RunFailed, match="has not answered for 120 s") as caught,
    ):
        processes.ensure(1)
    assert caught.value.rules == ("launcher-lost",)


def test_a_port_that_is_taken_is_refused() -> None:
    with listen_on_port(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} of this machine is in use") as e:
            listen_on_port(port)
    assert e.value.rules == ("port-in-use",)
    assert e.value.problems[0].key == "MASTER_PORT"


def test_a_process_that_is_gone_takes_messages_and_is_not_stopped(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    channel, theirs = channel_pair(send_timeout_s=1.0)
    theirs.close()
    rank = RankProcess(rank=0, pid=gone.pid, channel=channel, log_path=tmp_path / "absent.log")
    assert not rank.stopped()
    rank.send("a message")
    rank.signal(signal.SIGTERM)
    assert rank.log_tail(most_lines=3) == ""
    channel.close()


def test_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.log"
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    channel, theirs = channel_pair(send_timeout_s=1.0)
    rank = RankProcess(rank=0, pid=0, channel=channel, log_path=path)
    assert rank.log_tail(most_lines=2) == "line 998\nline 999"
    channel.close()
    theirs.close()
