"""Which kernels a run can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.problems import SMALL, problems_of, write

GPU = "cluster.preset=8xh100"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_triton_needs_a_gpu(small: Path) -> None:
    found = problems_of(small, ["kernels.provider=triton"])
    assert list(found) == ["triton-needs-gpu"]
    ways = found["triton-needs-gpu"].suggestions
    assert ways == ('kernels.provider = "plain"', 'kernels.provider = "compiled"')
    assert not problems_of(small, ["kernels.provider=compiled"])
    assert not problems_of("llama3-8b-zero3", ["kernels.provider=triton"])


def test_a_residual_is_added_in_the_kernel_of_a_norm(small: Path) -> None:
    sets = ["kernels.provider=compiled", 'kernels.fused=["residual", "swiglu"]']
    found = problems_of(small, sets)
    assert list(found) == ["residual-needs-norm"]
    assert found["residual-needs-norm"].suggestions == (
        'kernels.fused = ["norm", "residual", "swiglu"]',
        'kernels.fused = ["swiglu"]',
    )


@pytest.mark.parametrize(
    ("sets", "mended"),
    [
        (["kernels.provider=plain", 'kernels.fused=["norm"]'], 'kernels.provider = "compiled"'),
        (['kernels.fused=["norm"]'], 'kernels.provider = "compiled"'),
        (["kernels.provider=compiled", "kernels.fused=[]"], 'kernels.fused = "auto"'),
    ],
)
def test_pieces_that_nothing_fuses_are_refused(small: Path, sets: list[str], mended: str) -> None:
    found = problems_of(small, sets)
    assert list(found) == ["no-effect"]
    assert found["no-effect"].key == "kernels.fused"
    assert mended in found["no-effect"].suggestions


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        ("norm", "layernorm"),
        ("residual", "layernorm"),
        ("rotary", "no rotary positions"),
        ("swiglu", "no gate"),
    ],
)
def test_pieces_that_a_model_lacks_are_refused(piece: str, why: str) -> None:
    run = ["model.preset=gpt2", "model.layers=4", "cluster.preset=8xh100", "mesh.dp_shard=8"]
    run += ["batch.sequence_length=512"]
    job = load_job("llama3-8b-zero3", run)
    assert job.plan.layout.kernels.fused == ("loss", "update")
    found = problems_of("llama3-8b-zero3", [*run, f'kernels.fused=["{piece}", "loss"]'])
    assert list(found) == ["no-effect"]
    assert why in found["no-effect"].message
    assert 'kernels.fused = ["loss"]' in found["no-effect"].suggestions


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["kernels.provider=compiled"], 'kernels.provider = "compiled" has no kernel of it'),
        (["precision.master=bf16"], 'its kernel is of fp32, and precision.master = "bf16"'),
    ],
)
def test_an_update_in_one_pass_is_tritons_and_of_fp32(sets: list[str], why: str) -> None:
    assert "update" not in load_job("llama3-8b-zero3", sets).plan.layout.kernels.fused
    found = problems_of("llama3-8b-zero3", [*sets, 'kernels.fused=["norm", "update"]'])
    assert list(found) == ["no-effect"]
    assert why in found["no-effect"].message
    assert 'kernels.fused = ["norm"]' in found["no-effect"].suggestions


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_every_optimizer_has_elements_that_are_updated_in_one_pass(optimizer: str) -> None:
    plan = load_job("llama3-8b-zero3", [f"optimizer.kind={optimizer}"]).plan
    assert plan.layout.kernels.of("update") == "triton"
