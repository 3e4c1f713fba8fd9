"""Checkpoints of trainers, with those trainers: `ECHELON_PEERS` says where they are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.core.model_shape import Experts, ModelShape
from echelon.training.weights.files import find_weights
from tests.parallel.layouts import GPT2, NANO
from tests.training.weights.peers import model as size
from tests.training.weights.peers.run_peer import PEERS, run_peer
from tests.training.weights.test_export import back, drawn, our_logits, require_close
from tests.training.weights.trainer_folders import moments_back, stored_with_moments, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PEERS not in os.environ, reason=f"{PEERS} does not say where they are"),
]

LLAMA = replace(
    NANO,
    vocab=size.VOCAB,
    hidden=size.HIDDEN,
    ffn=size.FFN,
    layers=size.LAYERS,
    heads=size.HEADS,
    kv_heads=size.KV_HEADS,
    head_dim=size.HIDDEN // size.HEADS,
    max_positions=size.POSITIONS,
    norm_eps=size.EPS,
)
MOE = replace(
    LLAMA,
    name="moe",
    experts=Experts(num_experts=size.EXPERTS, top_k=size.TOP_K, ffn=size.FFN),
)
assert MOE.experts is not None
SHARED_MOE = replace(MOE, experts=replace(MOE.experts, shared_experts=1))
GPT = replace(
    GPT2,
    vocab=size.VOCAB,
    hidden=size.HIDDEN,
    ffn=size.FFN,
    layers=size.LAYERS,
    heads=size.HEADS,
    kv_heads=size.HEADS,
    head_dim=size.HIDDEN // size.HEADS,
    max_positions=size.POSITIONS,
    norm_eps=size.EPS,
)


def home() -> Path:
    """Return where the trainers are."""
    return Path(os.environ[PEERS])


def logits_of(shape: ModelShape, folder: Path) -> torch.Tensor:
    """Return our logits with the weights of a folder."""
    return our_logits(shape, back(folder, shape), size.asked()[0])


def require_saved(folder: Path, shape: ModelShape, file: str = "logits.pt") -> None:
    """Compare the logits that a trainer left beside its checkpoint with ours from it."""
    theirs = torch.load(folder / file)
    theirs = theirs["logits"] if isinstance(theirs, dict) else theirs
    require_close(theirs[0], logits_of(shape, folder))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_folders_of_deepspeed_are_read_and_continued_by_it(stage: int, tmp_path: Path) -> None:
    """Same logits here; written again, its engines go on with the same losses, at any stage."""
    folder = tmp_path / "ds"
    folder.mkdir()
    run_peer(home(), "deepspeed_case", "save", stage, folder)
    require_saved(folder, LLAMA, "computed.pt")
    found = find_weights(folder, LLAMA)
    assert found.step == 3
    assert set(found.moments) == {"exp_avg", "exp_avg_sq"}
    index = stored_with_moments(
        tmp_path / "checkpoint", back(folder, LLAMA), moments_back(folder, LLAMA), step=3
    )
    out = written("deepspeed", LLAMA, tmp_path, index)
    expected = torch.load(folder / "computed.pt")
    for other in {stage, 4 - stage}:
        run_peer(home(), "deepspeed_case", "universal", other, out)
        computed = torch.load(out / "computed.pt")
        require_close(computed["logits"], expected["logits"])
        assert computed["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("kind", ["titan", "fused", "plain"])
def test_folders_of_torchtitan_and_fsdp2_are_read(kind: str, tmp_path: Path) -> None:
    run_peer(home(), "torchtitan_case", "save", kind, tmp_path / "saved")
    require_saved(tmp_path / "saved", LLAMA)


def test_torchtitan_reads_what_is_written(tmp_path: Path) -> None:
    tensors = drawn(LLAMA, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=1)
    out = written("dcp", LLAMA, tmp_path, index)
    run_peer(home(), "torchtitan_case", "load", "titan", out)
    require_close(torch.load(out / "logits.pt")[0], our_logits(LLAMA, tensors, size.asked()[0]))


def test_experts_of_torchtitan_are_read_and_it_reads_ours(tmp_path: Path) -> None:
    """Bit for bit, by way of torchtitan's own adapter to the names of transformers."""
    shape = replace(MOE, qk_norm=True)
    run_peer(home(), "torchtitan_case", "save", "moe", tmp_path / "saved")
    (tmp_path / "theirs").mkdir()
    save_file(torch.load(tmp_path / "saved/adapted.pt"), tmp_path / "theirs/model.safetensors")
    expected = back(tmp_path / "theirs", shape)
    for name, one in back(tmp_path / "saved", shape).items():
        assert torch.equal(one, expected[name]), name
    tensors = drawn(shape, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=1)
    out = written("dcp", shape, tmp_path, index)
    run_peer(home(), "torchtitan_case", "load", "moe", out)
    (tmp_path / "ours").mkdir()
    save_file(torch.load(out / "adapted.pt"), tmp_path / "ours/model.safetensors")
    for name, one in back(tmp_path / "ours", shape).items():
        assert torch.equal(one, tensors[name]), name


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "shape"),
    [
        ("dist", 2, 1, LLAMA),
        ("dist", 1, 2, replace(LLAMA, tied=True)),
        ("legacy", 2, 2, LLAMA),
        ("legacy", 1, 2, replace(LLAMA, tied=True)),
        ("legacy", 2, 1, GPT),
        ("dist", 2, 1, GPT),
        ("dist", 1, 2, SHARED_MOE),
        ("legacy", 2, 1, SHARED_MOE),
    ],
    ids=lambda one: one.name if isinstance(one, ModelShape) else str(one),
)
def test_megatron_core_is_read_and_reads(
    kind: str, tp: int, pp: int, shape: ModelShape, tmp_path: Path
) -> None:
    words = [word for word in ("gpt2", "moe") if shape.name == word]
    words += ["tied"] if shape.tied and not words else []
    saved = tmp_path / "saved"
    run_peer(home(), "megatron_case", "save", tp, pp, kind, saved, *words, ranks=tp * pp)
    require_saved(saved, shape)
    tensors = drawn(shape, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=7)
    to = "megatron" if kind == "dist" else "megatron-legacy"
    out = written(to, shape, tmp_path, index, tp=tp, pp=pp)
    run_peer(home(), "megatron_case", "load", tp, pp, kind, out, *words, ranks=tp * pp)
    require_close(torch.load(out / "logits.pt")[0], our_logits(shape, tensors, size.asked()[0]))
