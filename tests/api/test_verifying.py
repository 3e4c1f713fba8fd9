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


CLIP = "norm = nn.utils.clip"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            "rank or REDUCE(tokens)",
            r"rank 1 .*\n.*rank 0 \(dp0\) waits in all_reduce of int64 \[\]",
        ),
        (
            "REDUCE(tokens) if rank else torch.distributed.barrier()",
            r"rank 0 \(dp0\) waits in barrier .*\n.*rank 1 \(dp1\) waits in all_reduce of int64",
        ),
        (
            "REDUCE(tokens.repeat(64 - 63 * rank))",
            r"got 128 bytes where it takes 8: another rank",
        ),
    ],
)
def test_ranks_that_never_meet_are_an_answer(
    new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = new.replace("REDUCE", "torch.distributed.all_reduce")
    monkeypatch.setattr("echelon.api.verifying.STILL_S", 3.0)
    with pytest.raises(ec.ProofFailed, match=said) as caught:
        ec.verify(written(tmp_path, "ddp", {CLIP: f"{line}\n        {CLIP}"}))
    assert caught.value.rules == ("collectives-meet",)


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
