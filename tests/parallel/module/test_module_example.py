"""The loop of one's own that the documentation shows, started as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool

SCRIPT = Path(__file__).parents[3] / "examples" / "own_loop.py"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "train.md"

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


BEFORE = """
import torch
import echelon as ec

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
loss = torch.nn.functional.mse_loss
batches = [(torch.ones(2, 8), torch.zeros(2, 8))] * 3
"""
"""What a reader has who writes the lines of the guide."""


def torchrun(script: Path, *arguments: str) -> str:
    """Return what two ranks print that torchrun has started."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system("S54")
@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["zero.stage=0"]])
def test_the_example_prints_the_same_at_every_stage(settings: list[str]) -> None:
    assert torchrun(SCRIPT, *settings) == PRINTED


def run_lines(_context: RankContext, lines: str) -> float:
    """Run lines that train, in a rank, and return what the model loses after them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(lines, "loop.py", "exec"), names)
    return names["loss"](names["model"](names["x"]), names["y"]).item()


def test_the_loop_of_the_guide_runs_as_it_stands(rank_pool: RankPool) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (loop,) = (block for block in blocks if "ec.parallelize" in block)
    # Ranks of the pool have met already; those of torchrun are in the test above.
    begin = 'dist.init_process_group("gloo")\n'
    assert loop.count(begin) == 1
    one, other = rank_pool.run(run_lines, f"{BEFORE}\n{loop.replace(begin, '')}", 2)
    assert one == other > 0.0
