"""Weights from files: the model computes what transformers' does, whatever the cut and the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from echelon.core.errors import CheckpointError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.training.checkpoint import ranks as checkpoint_ranks
from tests.training.weights import ranks
from tests.training.weights.hugging_face import (
    Tensors,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
)
from tests.training.weights.rectangles import require_rectangles

Logits = Callable[[ModelShape, Tensors, torch.Tensor], torch.Tensor]
MODELS = {
    "llama": (NANO, llama_tensors(NANO), llama_logits),
    "qwen": (QWEN, llama_tensors(QWEN), llama_logits),
    "gpt2": (GPT2, gpt2_tensors(GPT2), gpt2_logits),
}


def loaded(path: Path, shape: ModelShape, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return all parameters of a file, whole, by canonical name."""
    whole = {spec.name: torch.full(spec.shape, 7.0, dtype=dtype) for spec in parameters(shape)}
    wanted = {
        name: [Shard(name=name, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
        for name, t in whole.items()
    }
    load_weights(find_weights(path, shape), wanted, SingleRankCommunicator())
    return whole


def our_logits(shape: ModelShape, whole: Tensors, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the logits of our decoder with these parameters."""
    decoder = Decoder(shape)
    decoder.load_state_dict(whole)
    batch = TokenBatch.from_rows(tokens_T[None], tokens_T[None], torch.arange(1))
    return decoder.operations.logits(
        decoder.norm(decoder.hidden(None, batch)), decoder.head_weight
    ).detach()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    shape, tensors, logits = MODELS[name]
    save_file(tensors, tmp_path / "model.safetensors")
    tokens_T = torch.randint(0, shape.vocab, (12,))
    ours = our_logits(shape, loaded(tmp_path, shape), tokens_T)
    torch.testing.assert_close(ours, logits(shape, tensors, tokens_T), rtol=1e-4, atol=1e-4)


def test_an_index_of_several_files(tmp_path: Path) -> None:
    tensors = llama_tensors(NANO)
    files = {name: f"model-{i % 3}-of-3.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for path in (tmp_path, index):
        whole = loaded(path, NANO)
        assert torch.equal(whole["embedding.weight"], tensors["model.embed_tokens.weight"])
        assert torch.equal(whole["head.weight"], tensors["lm_head.weight"])


def test_names_of_our_own_and_of_models_without_a_head(tmp_path: Path) -> None:
    file = tmp_path / "any.safetensors"
    for spec_name, tensors in (
        ("ours", {s.name: torch.randn(s.shape) for s in parameters(QWEN)}),
        ("base", llama_tensors(QWEN, prefix="")),
    ):
        save_file(tensors, file)
        whole = loaded(file, QWEN)
        key = "embedding.weight" if spec_name == "ours" else "embed_tokens.weight"
        assert torch.equal(whole["embedding.weight"], tensors[key])
    save_file(gpt2_tensors(GPT2, prefix=""), file)
    assert torch.equal(
        loaded(file, GPT2)["layers.1.attention.k.bias"],
        gpt2_tensors(GPT2)["transformer.h.1.attn.c_attn.bias"][16:32],
    )


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_become_the_dtype_of_the_master(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in llama_tensors(NANO).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        whole = loaded(tmp_path, NANO, dtype)
        assert torch.equal(whole["norm.weight"], tensors["model.norm.weight"].to(dtype))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(5))
def test_any_rectangle_is_read(name: str, seed: int, tmp_path: Path) -> None:
    shape, tensors, _ = MODELS[name]
    random = Random(seed)
    # A buffer of a few rows makes blocks of them, and must grow for longer ones.
    save_file(tensors, tmp_path / "model.safetensors")
    whole = loaded(tmp_path, shape)
    require_rectangles(tmp_path, shape, whole, random, count=3, buffer_bytes=200)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["qwen", "gpt2"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_rank_of_a_run_gets_its_part(
    rank_pool: RankPool, name: str, stage: int, tmp_path: Path
) -> None:
    shape, tensors, _ = MODELS[name]
    save_file(tensors, tmp_path / "model.safetensors")
    plan = ranks.mixed(plan_of(pp=2, dp_shard=2, tp=2, model=shape), stage)
    whole = loaded(tmp_path, shape)
    found: dict[str, int] = {}
    for shards in rank_pool.run(ranks.load, (plan, tmp_path), world_size=8):
        for shard in shards:
            at = tuple(
                slice(start, start + size)
                for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
            )
            assert torch.equal(shard.tensor, whole[shard.name][at].to(shard.tensor.dtype))
            if shard.primary:
                kind = f"{shard.tensor.dtype} {shard.name}"
                found[kind] = found.get(kind, 0) + shard.tensor.numel()
    for spec in parameters(shape):
        assert found[f"torch.float32 {spec.name}"] == spec.numel
        assert found[f"torch.bfloat16 {spec.name}"] == spec.numel


def test_values_that_are_not_finite_here(tmp_path: Path) -> None:
    tensors = llama_tensors(NANO)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    assert loaded(tmp_path, NANO)["norm.weight"][3] == 1e6
    with pytest.raises(CheckpointError, match="not finite here: norm") as caught:
        loaded(tmp_path, NANO, torch.float16)
    assert caught.value.rules == ("weights-finite",)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    save_file(llama_tensors(NANO), tmp_path / "model.safetensors")
    weights = find_weights(tmp_path, NANO)
    os.truncate(tmp_path / "model.safetensors", 3000)
    tensor = torch.zeros(NANO.vocab, NANO.hidden)
    shard = Shard(name="head.weight", global_shape=(), offset=(0, 0), tensor=tensor, primary=True)
    with pytest.raises(CheckpointError, match="the file ends at byte") as caught:
        load_weights(weights, {"head.weight": [shard]}, SingleRankCommunicator())
    assert caught.value.rules == ("weights-file-readable",)


BOUNDED = """
import pathlib, sys, torch
from echelon.core.parameters import parameters
from echelon.core.plan import Mathematics
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.training.checkpoint.ranks import identity_of
from tests.training.weights.ranks import LARGE, slice_of
def memory(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
wanted, size = slice_of(int(sys.argv[3]))
path, alone = pathlib.Path(sys.argv[2]), SingleRankCommunicator()
def load(wanted):
    if sys.argv[1] == "weights":
        load_weights(find_weights(path, LARGE), wanted, alone)
    else:
        load_checkpoint(
            path, wanted={"parameters": wanted}, identity=identity_of(LARGE), exchange=alone
        )
# The program itself, which is read when it runs first, is no memory of a slice.
smallest = min(wanted, key=lambda name: wanted[name][0].tensor.numel())
load({smallest: wanted[smallest]})
before = memory("VmRSS")
load(wanted)
print(memory("VmHWM") - before, size)
assert all(bool((one.tensor == 1).all()) for shards in wanted.values() for one in shards)
"""


def _grown(*arguments: str) -> tuple[int, int]:
    """Return by how much the peak of a process grew while it loaded, and the bytes of its slice."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *arguments], capture_output=True, text=True, check=True
    )
    grown, size = map(int, done.stdout.split())
    return grown, size


@pytest.mark.system("S27")
@pytest.mark.quick("weights-rows")
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_rank_that_loads_needs_less_than_1_3_times_its_slice(
    kind: str, dim: int, tmp_path: Path
) -> None:
    """S27: a process that reads a quarter of a model of 115 MB grows by that and one buffer."""
    tensors = {spec.name: torch.ones(spec.shape) for spec in parameters(ranks.LARGE)}
    path = tmp_path
    if kind == "weights":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        path = checkpoint_ranks.save_whole(tmp_path, ranks.LARGE, tensors)
    grown, size = _grown(kind, str(path), str(dim))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 3.9 * size
    assert size < grown < 1.3 * size
