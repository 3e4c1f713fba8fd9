"""A run with experts goes on under every layout: biases and shares are part of its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.core.errors import CheckpointError
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.training.checkpoint.index import read_index
from tests.training.small_runs import (
    FP64,
    checkpoint_of,
    read_steps,
    small_data,
    train,
    whole_state,
)

EXPERTS = (
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=24",
    "model.experts.router_bias=true",
    "experts.balance=both",
    "experts.aux_coefficient=0.1",
    "experts.bias_rate=0.01",
    "experts.z_coefficient=0.001",
)
EP2_ZERO3 = ("mesh.dp_shard=4", "mesh.ep=2", "zero.stage=3")
EP1 = ("mesh.dp_replicate=2", "mesh.tp=2")
EP4 = ("mesh.dp_shard=4", "mesh.ep=4", "zero.stage=1")
CUT = ("mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=2", "experts.expert_tp=2")
PIPED = ("mesh.dp_shard=2", "mesh.pp=2", "mesh.ep=2", "zero.stage=2")
CONTEXT = ("mesh.cp=2", "mesh.tp=2", "mesh.ep=4", "mesh.sequence_parallel=true")
ALONE = ("mesh.dp_shard=1",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def unbroken(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return a run of ep2 x ZeRO-3 that nothing stopped."""
    run = tmp_path_factory.mktemp("unbroken")
    train(rank_pool, run, data, (*FP64, *EXPERTS, *EP2_ZERO3))
    return run


def assert_agree(found: Path, expected: Path) -> None:
    """Check that two checkpoints hold the same, but for how sums are rounded."""
    got, wanted = whole_state(found), whole_state(expected)
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "layout",
    [EP1, EP4, CUT, PIPED, CONTEXT, ALONE],
    ids=["ep1 tp2", "ep4", "expert_tp2", "pp2", "cp2 tp2 ep4", "one rank"],
)
def test_what_ep2_and_zero3_saved_goes_on_under_another_layout(
    layout: tuple[str, ...], rank_pool: RankPool, tmp_path: Path, data: Path, unbroken: Path
) -> None:
    middle, settings = checkpoint_of(unbroken, 4), (*FP64, *EXPERTS, *layout)
    train(rank_pool, tmp_path / "run", data, settings, resume=middle)
    expected = read_steps(unbroken)
    found = read_steps(tmp_path / "run")
    assert sorted(found) == [5, 6, 7, 8]
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-11, abs=0)
    assert_agree(checkpoint_of(tmp_path / "run", 8), checkpoint_of(unbroken, 8))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EP2_ZERO3, CUT], ids=["ep2 ZeRO-3", "expert_tp2"])
def test_under_its_own_layout_it_goes_on_bit_for_bit(
    layout: tuple[str, ...], rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    settings = (*EXPERTS, *layout, "precision.parameters=bf16")
    train(rank_pool, tmp_path / "whole", data, settings)
    middle = checkpoint_of(tmp_path / "whole", 4)
    train(rank_pool, tmp_path / "again", data, settings, resume=middle)
    for rank in range(4):
        expected = read_steps(tmp_path / "whole", rank)
        found = read_steps(tmp_path / "again", rank)
        assert found == {step: expected[step] for step in range(5, 9)}
    expected = whole_state(checkpoint_of(tmp_path / "whole", 8))
    got = whole_state(checkpoint_of(tmp_path / "again", 8))
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_biases_and_shares_are_saved_once_and_are_those_of_the_loads(unbroken: Path) -> None:
    path = checkpoint_of(unbroken, 6)
    tensors, state = read_index(path).tensors, whole_state(path)
    for kind, leaf in (("router_bias", "bias"), ("router_share", "share")):
        names = {f"layers.{layer}.mlp.router.{leaf}" for layer in range(2)}
        assert set(tensors[kind]) == names
        for name in names:
            (piece,) = tensors[kind][name].pieces
            assert piece.shape == (4,)
            assert state[f"{kind}/{name}"].dtype == torch.float64
    for layer in range(2):
        bias = state[f"router_bias/layers.{layer}.mlp.router.bias"]
        share = state[f"router_share/layers.{layer}.mlp.router.share"]
        # Six steps moved each bias by 0.01, one way or the other (or not at all).
        moves = bias / 0.01
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-9)
        assert 0 < moves.abs().max() <= 6.0 + 1e-9
        assert float(share.sum()) == pytest.approx(1.0, abs=1e-12)
        # 8 sequences of 16 tokens choose 2 experts each: shares are whole numbers of 256.
        torch.testing.assert_close(share * 256, (share * 256).round(), rtol=0, atol=1e-9)
        assert not torch.equal(share, torch.full_like(share, 0.25))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("experts.aux_coefficient=0.2", "balance.aux_coefficient was 0.1, is 0.2"),
        ("experts.capacity_factor=1.5", "balance.capacity_factor was None, is 1.5"),
        ("model.experts.top_k=3", "model.experts.top_k was 2, is 3"),
    ],
)
def test_another_balance_is_other_mathematics(
    change: str, said: str, rank_pool: RankPool, tmp_path: Path, data: Path, unbroken: Path
) -> None:
    key = change.split("=", maxsplit=1)[0]
    kept = [one for one in EXPERTS if not one.startswith(f"{key}=")]
    middle = checkpoint_of(unbroken, 4)
    with pytest.raises((CheckpointError, RankFailure), match="other mathematics") as caught:
        train(rank_pool, tmp_path, data, (*FP64, *kept, *EP4, change), resume=middle)
    assert said in str(caught.value)


@pytest.mark.parametrize("with_biases", [True, False], ids=["biases", "no biases"])
def test_a_file_of_weights_brings_the_biases_that_it_has(
    with_biases: bool, rank_pool: RankPool, tmp_path: Path, data: Path, unbroken: Path
) -> None:
    tensors = {
        name.partition("/")[2]: tensor
        for name, tensor in whole_state(checkpoint_of(unbroken, 8)).items()
        if name.startswith(("parameters/", "router_bias/") if with_biases else "parameters/")
    }
    name = "layers.1.mlp.router.bias"
    begun = torch.tensor([0.5, -0.25, 0.0, 0.125], dtype=torch.float64)
    if with_biases:
        tensors[name] = begun
    save_file(tensors, tmp_path / "model.safetensors")
    weights = f"train.weights={tmp_path / 'model.safetensors'}"
    steps = ("train.steps=2", "optimizer.warmup_steps=1")
    train(rank_pool, tmp_path / "run", data, (*FP64, *EXPERTS, *EP4, *steps, weights))
    after = whole_state(checkpoint_of(tmp_path / "run", 2))[f"router_bias/{name}"]
    moved = after - (begun if with_biases else 0.0)
    # Two steps moved each by 0.01, one way or the other.
    torch.testing.assert_close(moved / 0.01, (moved / 0.01).round(), rtol=0, atol=1e-9)
    assert moved.abs().max() <= 0.02 + 1e-12
