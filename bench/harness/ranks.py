"""Start the ranks of a case on hosts, give them commands, collect their replies, end them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.catalogue import Case
from bench.harness.hosts import Host
from bench.harness.spec import Settings

START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 20.0
SETTLE_S = 0.1


class CaseFailed(Exception):
    """A case did not start or did not finish its steps; the message says what its ranks said."""


class CaseSkipped(Exception):
    """A case says that it cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Hold what one round of one case took: per step, over all its ranks."""

    step_s: float
    cpu_s: float
    sent_bytes: int | None
    uplink_bytes: int | None
    peak_bytes: int
    first_loss: float | None
    last_loss: float | None
    recorded_bytes: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    commands: int
    replies: int
    log: Path


class RankGroup:
    """The live ranks of one case; a context manager that ends them whatever happens."""

    def __init__(self, case: Case, settings: Settings, hosts: Sequence[Host], logs: Path) -> None:
        """Prepare `settings.mode.world_size` ranks, an equal run of consecutive ones per host."""
        self.case = case
        self._settings = settings
        self._hosts = hosts
        self._logs = logs
        self._ranks: list[_Rank] = []
        self._next_step = 0

    def __enter__(self) -> RankGroup:
        """Start the ranks and wait until every one is built."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self.close()

    def run(self, *, warmup: int, steps: int) -> Measurement:
        """Run steps on all ranks at once and return what they took."""
        before = self._counters()
        command = {"do": "run", "first": self._next_step, "warmup": warmup, "steps": steps}
        replies = self._ask(command, STEP_TIMEOUT_S * (warmup + steps))
        after = self._settled_counters()
        self._next_step += warmup + steps
        count = warmup + steps
        total, uplink = _sent(before, after, count)
        losses = [row for row in (reply["losses"] for reply in replies) if row[0] is not None]
        means = [statistics.fmean(column) for column in zip(*losses, strict=True)]
        return Measurement(
            step_s=max(reply["step_s"] for reply in replies),
            cpu_s=sum(reply["cpu_s"] for reply in replies),
            sent_bytes=total,
            uplink_bytes=uplink,
            peak_bytes=max(reply["peak_bytes"] for reply in replies),
            first_loss=means[0] if means else None,
            last_loss=means[-1] if means else None,
            recorded_bytes=_recorded(replies, count),
        )

    def profile(self, *, steps: int) -> list[list[Any]]:
        """Return the operators of rank 0: (name, calls, own CPU seconds) per step."""
        command = {"do": "profile", "first": self._next_step, "steps": steps}
        self._next_step += steps
        return self._ask(command, STEP_TIMEOUT_S * (steps + 2))[0]["operators"]

    def close(self) -> None:
        """Ask the ranks to stop, then end those that do not; safe to call twice."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                os.write(rank.commands, b'{"do": "stop"}\n')
        deadline = time.monotonic() + 5
        while self._ranks and time.monotonic() < deadline:
            if all(rank.process.poll() is not None for rank in self._ranks):
                break
            time.sleep(0.05)
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            os.close(rank.commands)
            os.close(rank.replies)
        self._ranks = []

    def _start(self) -> None:
        world = self._settings.mode.world_size
        port = self._hosts[0].free_port()
        for rank in range(world):
            self._ranks.append(self._spawn(rank, world, port))
        self._replies(START_TIMEOUT_S)

    def _spawn(self, rank: int, world: int, port: int) -> _Rank:
        per_host = world // len(self._hosts)
        host = self._hosts[rank // per_host]
        command_out, command_in = os.pipe()
        reply_out, reply_in = os.pipe()
        python = [str(self.case.python), "-m", "bench.harness.rank", "--settings"]
        pipes = ["--commands", str(command_out), "--replies", str(reply_in)]
        log = self._logs / f"{self.case.slug}-{self._settings.mode.name}-rank{rank}.log"
        environment = {
            **os.environ,
            **_rank_environment(host, self._settings.threads, self.case.root),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_host),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank // per_host),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": str(port),
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                host.command(*python, self._settings.to_json(), *pipes),
                env=environment,
                cwd=self.case.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(command_out, reply_in),
                start_new_session=True,
            )
        os.close(command_out)
        os.close(reply_in)
        return _Rank(process, command_in, reply_out, log)

    def _ask(self, command: dict[str, object], timeout_s: float) -> list[dict[str, Any]]:
        line = json.dumps(command).encode() + b"\n"
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                os.write(rank.commands, line)
        return self._replies(timeout_s)

    def _replies(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return one reply per rank; the first death, error or silence ends the case."""
        buffers = [b"" for _ in self._ranks]
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                selector.register(rank.replies, selectors.EVENT_READ, index)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise CaseFailed(f"no answer within {timeout_s:.0f} s")
                for key, _ in ready:
                    index: int = key.data
                    chunk = os.read(key.fd, 1 << 20)
                    buffers[index] += chunk
                    if not chunk:
                        raise CaseFailed(self._epitaph(index))
                    if buffers[index].endswith(b"\n"):
                        selector.unregister(key.fd)
                        _raise_if_refused(index, json.loads(buffers[index]))
        return [json.loads(buffer) for buffer in buffers]

    def _epitaph(self, index: int) -> str:
        rank = self._ranks[index]
        code = rank.process.wait()
        text = rank.log.read_text(errors="replace").strip().splitlines()
        return f"rank {index} ended with {code}: {text[-1] if text else 'no output'} ({rank.log})"

    def _settled_counters(self) -> list[dict[str, int] | None]:
        """Return the counters once nothing is sent: a step may end while its updates travel.

        So they are counted, and the next case does not start beside them.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        found = self._counters()
        while found[0] is not None and time.monotonic() < deadline:
            time.sleep(SETTLE_S)
            before, found = found, self._counters()
            if before == found:
                break
        return found

    def _counters(self) -> list[dict[str, int] | None]:
        return [host.sent_bytes() for host in self._hosts]


def _rank_environment(host: Host, threads: int, root: Path) -> dict[str, str]:
    """Return what every framework must be told alike: interface, threads, no network, no GPU."""
    return {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}",
        "GLOO_SOCKET_IFNAME": host.interface,
        "TP_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }


def _raise_if_refused(index: int, reply: dict[str, Any]) -> None:
    if "not_applicable" in reply:
        raise CaseSkipped(reply["not_applicable"])
    if "error" in reply:
        raise CaseFailed(f"rank {index}: {reply['error'].strip()}")


def _sent(
    before: list[dict[str, int] | None], after: list[dict[str, int] | None], steps: int
) -> tuple[int | None, int | None]:
    """Return the bytes sent per step: on all interfaces together, and on the busiest uplink."""
    total, uplink = 0, None
    for old, new in zip(before, after, strict=True):
        if old is None or new is None:
            return None, None
        moved = {name: (count - old[name]) // steps for name, count in new.items()}
        total += sum(moved.values())
        if "e0" in moved:
            uplink = max(uplink or 0, moved["e0"])
    return total, uplink


def _recorded(replies: list[dict[str, Any]], steps: int) -> dict[str, int] | None:
    """Return the bytes per axis and step that the ranks say they sent, where they say it."""
    if "recorded_bytes" not in replies[0]:
        return None
    totals: dict[str, int] = {}
    for reply in replies:
        for axis, count in reply["recorded_bytes"].items():
            totals[axis] = totals.get(axis, 0) + count
    return {axis: count // steps for axis, count in totals.items()}
