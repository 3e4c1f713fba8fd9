"""A link between two hosts that is cut in earnest: ranks under torchrun name it, and its ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.desync import two_hosts
from tests.launch.desync.planted import WRONG_AT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
START_S, END_S = 120.0, 120.0
OPERATION = (
    r"all_\w+ \S+ of \w+ \[\d+\], call \d+ of ranks 0, 1 \((?:dp|world)\), at \S+:\d+ in \w+"
)
"""The cut may come between a step's sums over the mesh and the word of all ranks about it."""
SENT = r"has sent \d+ packets? to {to} and again (once|\d+ times), from {here}:\d+ to {there}:\d+"


def cut_while_training(folder: Path, store_at: str, num_errors: int) -> str:
    """Return what two ranks on two hosts say whose link is cut while they train."""
    why = two_hosts.why_not()
    if why:
        pytest.skip(f"no two hosts on this machine: {why}")
    argument = {
        "target": "tests.launch.desync.planted:train_wrongly",
        "layout": "dp-pair",
        "steps": 100_000,
        "desync_s": 2.0,
        "step_s": 8.0,
        "mistake": {"case": "link", "rank": 1, "group": ""},
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    said = folder / "said"
    with two_hosts.two_hosts() as hosts, said.open("wb") as output:
        launchers = [
            hosts.start(
                host, _command(host, store_at, argument, folder), environment, output.fileno()
            )
            for host in (0, 1)
        ]
        try:
            _until(lambda: WRONG_AT in said.read_text(), launchers, START_S)
            hosts.cut()
            # A launcher that reaches no store waits for it for long after its rank has ended.
            _until(lambda: said.read_text().count("error[link-carries]") == num_errors, [], END_S)
        finally:
            for launcher in launchers:
                os.killpg(launcher.pid, signal.SIGTERM)
            for launcher in launchers:
                launcher.wait(END_S)
    return said.read_text()


def _command(host: int, store_at: str, argument: object, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)),
        *("--nproc-per-node", "1", "--max-restarts", "0", "--master-port", "29611"),
        *("--master-addr", store_at, "--local-addr", two_hosts.CONTROL[host]),
        *("-m", "tests.launch.torchrun_script", json.dumps(argument), "2", str(folder)),
    ]


def _until(
    done: Callable[[], bool], launchers: list[subprocess.Popen[bytes]], most_s: float
) -> None:
    until = time.monotonic() + most_s
    while not done():
        assert time.monotonic() < until
        assert all(one.poll() is None for one in launchers)
        time.sleep(0.1)


def test_both_ends_of_a_link_are_named_and_what_shows_it(tmp_path: Path) -> None:
    said = cut_while_training(tmp_path, two_hosts.CONTROL[0], 1)
    note = said[said.index("note: ") :]
    first = note.splitlines()[0]
    assert re.match(r"note: rank 0 \(dp0\): and rank 1 \(dp1\) do not reach each other: ", first)
    assert len(re.findall(OPERATION, note.partition("no error yet")[0])) == 2
    ends = zip((0, 1), two_hosts.DATA, reversed(two_hosts.DATA), strict=True)
    for rank, here, there in ends:
        to = rf"rank {1 - rank} \(dp{1 - rank}\) on \w+{'ba'[rank]}"
        sent = SENT.format(to=to, here=re.escape(here), there=re.escape(there))
        assert re.search(rf"rank {rank} \(dp{rank}\) on \w+{'ab'[rank]} {sent}", note), said
    assert "error[link-carries]: rank 0 (dp0): and rank 1 (dp1) do not reach each other" in said


def test_a_rank_that_reaches_no_store_says_alone_what_it_knows(tmp_path: Path) -> None:
    said = cut_while_training(tmp_path, two_hosts.DATA[0], 2)
    here, there = map(re.escape, two_hosts.DATA)
    # The host of the store hears nothing of the other: that end is known by silence alone.
    assert re.search(r"note: rank 0 \(dp0\): and rank 1( \(dp1\))? do not reach each other: ", said)
    sent = SENT.format(to=r"rank 1 \(dp1\) on \w+b", here=here, there=there)
    assert re.search(rf"rank 0 \(dp0\) on \w+a {sent}", said), said
    alone = rf"note: rank 1 \(dp1\): waits in all_\w+ \S+, and nothing comes from {here}, nor"
    assert re.search(alone, said), said
    assert re.search(rf"rank 1 \(dp1\) {OPERATION}", said), said
    assert re.search(r"error\[link-carries\]: rank 0 \(dp0\): and rank 1", said), said
    assert "error[link-carries]: rank 1 (dp1): waits in all_" in said
