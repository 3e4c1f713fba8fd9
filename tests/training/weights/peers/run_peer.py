"""Run a program of a trainer in the environment of the peers, on some ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
PEERS = "ECHELON_PEERS"
"""Where `bench/setup_peers.sh` put the peers, in the environment of tests."""


def peers_python(home: Path) -> Path:
    """Return the interpreter of the peers."""
    return home / "venv" / "bin" / "python"


def run_peer(home: Path, case: str, *arguments: object, ranks: int = 2, port: int = 29611) -> str:
    """Run a program of this folder on some ranks; its output. RuntimeError says why it failed."""
    command = [
        str(peers_python(home)),
        *("-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks), "--master-port", str(port)),
        *("-m", f"tests.training.weights.peers.{case}", *map(str, arguments)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout
