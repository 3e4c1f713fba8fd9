"""Programs of examples/ in other frameworks, each by one command in the peers' environment.

`bench/setup_peers.sh` makes it: `.peers` in the checkout, or where ECHELON_PEERS says.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.examples.programs import RIGHT, ROOT, WRONG
from tests.examples.test_wrong import VERDICTS

PYTHON = Path(os.environ.get("ECHELON_PEERS", ROOT / ".peers")) / "venv" / "bin" / "python"
RIGHT_PROGRAMS = (
    "accelerate_ddp.py",
    "deepspeed_zero.py",
    "deepspeed_zero.py:on_rank_zero2",
    "deepspeed_zero.py:on_rank_zero1",
    "hf_trainer.py",
    "megatron_distributed_optimizer.py",
    "megatron_pipeline.py",
    "megatron_tensor_parallel.py",
    "torchtitan_llama.py",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="bench/setup_peers.sh has not been run"),
]


def proof_by_command(file: Path) -> dict[str, Any]:
    """Return what `echelon prove --subject FILE --json` prints in the peers' environment."""
    done = subprocess.run(
        [PYTHON, "-m", "echelon", "prove", "--subject", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode in {0, 1}, done.stderr
    return json.loads(done.stdout)["proof"]


@pytest.mark.parametrize("name", RIGHT_PROGRAMS)
def test_a_right_program_of_a_framework_is_proven(name: str) -> None:
    proof = proof_by_command(RIGHT / name)
    assert proof["proven"], [one["diagnosis"] for one in proof["passes"]]


@pytest.mark.parametrize("name", [name for name, one in VERDICTS.items() if one.framework])
def test_a_wrong_program_of_a_framework_is_named(name: str) -> None:
    wanted = VERDICTS[name]
    proof = proof_by_command(WRONG / f"{name}.py")
    told = next(one["diagnosis"] for one in proof["passes"] if one["diagnosis"] is not None)
    found = tuple(told[key] for key in ("rule", "tensor", "factor", "axis"))
    assert found == (wanted.rule, wanted.tensor, wanted.factor, wanted.axis), told["says"]
    assert proof_by_command(WRONG / f"{name}.py:on_rank_fixed")["proven"]


def test_types_accept_and_refuse_what_the_guide_says() -> None:
    """The script exits 1 where a verdict of spmd_types is not the expected one."""
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-m", "tests.examples.spmd_types_check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
