"""Ranks of a script on hosts that shaped links join, and the bytes that leave each host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.hosts import Host

RANK = "BENCH_HOST_RANK"
"""What tells a process that it is a rank, and which."""
ADDRESS = "BENCH_ADDRESS"
"""Where rank 0 is."""


def bytes_out() -> int:
    """Return what this host has sent to others so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if "e0:" in line)


def run_on_hosts(
    module: str, hosts: Sequence[Host], words: Sequence[str], *, each: int, timeout_s: float
) -> Any:
    """Start `each` ranks of a module on every host, and return the JSON that rank 0 prints last."""
    started: list[subprocess.Popen[str]] = []
    for rank in range(len(hosts) * each):
        host = hosts[rank // each]
        environment = {
            **os.environ,
            RANK: str(rank),
            ADDRESS: hosts[0].address,
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = host.command(sys.executable, "-m", module, *words)
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        told = [one.communicate(timeout=timeout_s)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    if any(one.returncode for one in started):
        sys.exit("error: a rank ended with an error")
    return json.loads(told[0].splitlines()[-1])
