"""torch's own compositions: right ones are proven, and one changed line in each is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.verify.planted_programs import proof_of

STEP = "        optimizer.step()"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["fsdp2", "tensor_parallel", "pipeline"])
def test_it_is_proven(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    proof = proof_of(rank_pool, tmp_path, name)
    assert proof.proven, proof.diagnosis
    assert (proof.framework, proof.num_parameters) == ("torch", 12)


@pytest.mark.quick("tensor_parallel-changes1-wanted1", "pipeline-changes3-wanted3")
@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        (
            "fsdp2",
            {"loss.backward()": "(loss / case.degrees['dp']).backward()"},
            ("prove-gradients", "head.weight", "1/dp", "dp"),
        ),
        (
            "tensor_parallel",
            {
                "        loss.backward()\n": "        loss.backward()\n        if number == 1:\n"
                "            model.layers[0].up.weight.grad.mul_(-1)\n"
            },
            ("prove-gradients", "layers.0.up.weight", "sign", ""),
        ),
        (
            "pipeline",
            {"layer_offsets=(offset,)": "layer_offsets=(0,)"},
            ("prove-nothing-dropped", "layers.1.norm.weight", "missing", ""),
        ),
        (
            "pipeline",
            {"scale_grads=True": "scale_grads=False"},
            ("prove-gradients", "head.weight", "microbatches", ""),
        ),
    ],
)
def test_one_changed_line_is_named(
    name: str,
    changes: dict[str, str],
    wanted: tuple[str, ...],
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    told = proof_of(rank_pool, tmp_path, name, changes).diagnosis
    assert told is not None
    assert (told.rule, told.tensor, told.factor, told.axis) == wanted, told.says
