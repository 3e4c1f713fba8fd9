"""The loop of one's own that the documentation shows, started as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "own_loop.py"

PRINTED = """\
step 0  grad_norm 2.9065
step 1  grad_norm 2.2634
step 2  grad_norm 2.8084
step 3  grad_norm 2.3628
step 4  grad_norm 2.7019
unit 0       8512 bytes
unit 1       8512 bytes
unit 2       8512 bytes
unit 3       8512 bytes
"""


@pytest.mark.parametrize("settings", [[], ["zero.stage=0"]])
def test_the_example_prints_the_same_at_every_stage(settings: list[str]) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(SCRIPT), *settings),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED
