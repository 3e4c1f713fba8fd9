"""`ec.verify` starts the ranks of a file, or joins those of a launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import echelon as ec
from tests.proof.verify.planted_programs import written


def test_a_file_is_proven_on_ranks_that_are_started_here(tmp_path: Path) -> None:
    proof = ec.verify(written(tmp_path, "ddp", {"DTYPE = torch.float32": "NUM_STEPS = 2"}))
    assert (proof.proven, proof.num_steps) == (True, 2)


def test_a_mistake_of_the_user_is_an_error_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(ec.ConfigError, match=r"verify-mesh.*dp2: 2 ranks, not 3"):
        ec.verify(written(tmp_path, "ddp"), ranks=3)


@pytest.mark.slow
def test_ranks_of_torchrun_are_joined(tmp_path: Path) -> None:
    file = written(tmp_path, "ddp")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "echelon", "prove", "--subject", str(file)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nproven\n") == 1
