"""DeepSpeed, where it is installed: stages 1 to 3 are proven, and planted bugs are named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch import nn

from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.deepspeed import is_deepspeed
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program
from tests.proof.verify.planted_programs import fresh_proof_of

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="no deepspeed: bench/setup_peers.sh"
)
TABLE = NameTable(
    logical=LogicalParameters(shapes={}, aliases={}), mesh=NamedMesh({"dp": 1}), rank=0
)


class DeepSpeedEngine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.optimizer = None


def test_an_engine_is_known_as_the_model_itself() -> None:
    assert is_deepspeed(open_program(OnRank(model=DeepSpeedEngine(), step=str), TABLE))
    assert not is_deepspeed(open_program(OnRank(model=nn.Linear(2, 2), step=str), TABLE))


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_are_proven(stage: int, tmp_path: Path) -> None:
    proof = fresh_proof_of(tmp_path, "zero_deepspeed", {"CLIP = 2": f"CLIP = {stage}"})
    assert proof.proven, proof.diagnosis
    assert proof.framework == "DeepSpeed"


@needs_deepspeed
def test_a_mean_that_is_taken_twice_is_named(tmp_path: Path) -> None:
    changes = {"engine.backward(loss)": "engine.backward(loss / dp)"}
    told = fresh_proof_of(tmp_path, "zero_deepspeed", changes).diagnosis
    assert told is not None
    assert (told.rule, told.factor, told.axis) == ("prove-gradients", "1/dp", "dp")
