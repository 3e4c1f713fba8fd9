"""Weights that leave: transformers computes from the folder what the model here computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.core.errors import CheckpointError
from echelon.core.model_shape import Experts, ModelShape, RopeScaling
from echelon.core.parameters import parameters, router_biases
from echelon.interop.hugging_face.folder import (
    INDEX_NAME,
    folder_tensors,
    hub_config,
    index_text,
    share_out,
)
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex, TensorEntry
from echelon.training.checkpoint.shard_file import write_shard_file
from echelon.training.steps.expert_balance import ROUTER_BIAS
from echelon.training.weights.export import open_model
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from echelon.training.weights.writers.shares import Writers
from echelon.training.weights.writers.task import write_files
from tests.parallel.layouts import GPT2, NANO, QWEN
from tests.training.weights.transformers_models import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN3_MOE

Tensors = dict[str, torch.Tensor]

LLAMA3 = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=32
)
SHAPES = {
    "llama": NANO,
    "llama-3.1": replace(NANO, rope_scaling=LLAMA3, rope_theta=5e5),
    "llama-biases": replace(NANO, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True),
    "mistral": replace(NANO, window=8),
    "qwen2": replace(NANO, qkv_bias=True, tied=True),
    "qwen2-window": replace(NANO, qkv_bias=True, window=6),
    "qwen3": replace(QWEN, qkv_bias=False, qk_norm=True),
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "gpt2": GPT2,
}
TYPES = {
    "llama-3.1": "llama",
    "llama-biases": "llama",
    "qwen2-window": "qwen2",
}


def drawn(shape: ModelShape, seed: int) -> Tensors:
    """Return random weights of a model, and of its routers' biases."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.3 + (len(spec.shape) == 1)
        for spec in (*parameters(shape), *router_biases(shape))
    }


def cut(random: Random, name: str, tensor: torch.Tensor) -> list[Shard]:
    """Return a tensor in up to four pieces, along its dims, as ranks of some layout hold it."""
    pieces = [((0,) * tensor.dim(), tensor)]
    for dim in range(tensor.dim()):
        cuts: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for offset, piece in pieces:
            at = random.randrange(1, piece.shape[dim]) if piece.shape[dim] > 1 else 0
            for start, part in (
                (0, piece.narrow(dim, 0, at)),
                (at, piece.narrow(dim, at, piece.shape[dim] - at)),
            ):
                if part.numel():
                    place = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
                    cuts.append((place, part))
        pieces = cuts
    shape = tuple(tensor.shape)
    return [
        Shard(name=name, global_shape=shape, offset=offset, tensor=part.contiguous(), primary=True)
        for offset, part in pieces
    ]


def stored(folder: Path, tensors: Tensors, seed: int) -> CheckpointIndex:
    """Write a checkpoint of two files whose tensors are cut at random; return its index."""
    random = Random(seed)
    folder.mkdir()
    by_file: list[dict[str, dict[str, list[Shard]]]] = [{}, {}]
    for name, tensor in tensors.items():
        kind = ROUTER_BIAS if name.endswith("router.bias") else PARAMETERS
        for shard in cut(random, name, tensor):
            by_file[random.randrange(2)].setdefault(kind, {}).setdefault(name, []).append(shard)
    found: dict[str, dict[str, TensorEntry]] = {PARAMETERS: {}, ROUTER_BIAS: {}}
    for place, shards in enumerate(by_file):
        written = write_shard_file(folder, f"rank-{place}.safetensors", shards)
        for one in written.shards:
            there = found[one.kind].get(one.name)
            before = () if there is None else there.pieces
            found[one.kind][one.name] = TensorEntry(
                dtype=one.dtype, shape=one.global_shape, pieces=(*before, one.entry)
            )
    return index_of(found)


def index_of(tensors: dict[str, dict[str, TensorEntry]]) -> CheckpointIndex:
    """Return the index of a checkpoint that has these tensors."""
    return CheckpointIndex(
        step=1,
        world_size=2,
        echelon_version="",
        plan_hash="",
        model_hash="",
        tokenizer_hash="",
        mathematics={},
        files={},
        tensors=tensors,
    )


def exported(
    folder: Path, shape: ModelShape, tensors: Tensors, *, seed: int = 0, file_bytes: int = 10**9
) -> Path:
    """Write the folder of a model with these weights, and return it."""
    index = stored(folder / "checkpoint", tensors, seed)
    config = hub_config(shape)
    parts = folder_tensors(shape, config.architecture)
    files = share_out(parts, 4, file_bytes)
    out = folder / "out"
    out.mkdir()
    write_files(
        open_model(folder / "checkpoint", index, parts), files, out, torch.float32, Writers(2)
    )
    if len(files) > 1:
        (out / INDEX_NAME).write_text(index_text(files, 4))
    (out / "config.json").write_text(json.dumps({**config.keys, "torch_dtype": "float32"}))
    return out


def our_logits(shape: ModelShape, tensors: Tensors, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the logits of our decoder with these weights."""
    decoder = Decoder(shape)
    names = {spec.name for spec in parameters(shape)}
    decoder.load_state_dict({name: tensors[name] for name in names})
    decoder.operations.routing.biases = {
        spec.layer: tensors[spec.name] for spec in router_biases(shape) if spec.layer is not None
    }
    batch = TokenBatch.from_rows(tokens_T[None], tokens_T[None], torch.arange(1))
    hidden = decoder.norm(decoder.hidden(None, batch))
    return decoder.operations.logits(hidden, decoder.head_weight).detach()


def require_close(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Compare logits: both sum numbers of their size in fp32, in another order."""
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


def back(out: Path, shape: ModelShape) -> Tensors:
    """Return what a run that starts from the folder begins with."""
    specs = (*parameters(shape), *router_biases(shape))
    whole = {spec.name: torch.full(spec.shape, 7.0) for spec in specs}
    wanted = {
        name: [Shard(name=name, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
        for name, t in whole.items()
    }
    load_weights(find_weights(out, shape), wanted, SingleRankCommunicator())
    return whole


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_what_the_model_computes_and_it_comes_back(
    name: str, tmp_path: Path
) -> None:
    """Every family: logits to 1e-5, and the same bits where the folder is read again."""
    shape = SHAPES[name]
    tensors = drawn(shape, 3)
    out = exported(tmp_path, shape, tensors, file_bytes=20_000)
    assert json.loads((out / "config.json").read_text())["model_type"] == TYPES.get(name, name)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens_T = torch.randint(0, shape.vocab, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens_T[None]).logits[0]
    ours = our_logits(shape, tensors, tokens_T)
    require_close(theirs, ours)
    for key, tensor in back(out, shape).items():
        assert torch.equal(tensor, tensors[key]), key


def random_shape(random: Random) -> ModelShape:
    """Return a small model of one of the families, with heads, biases and positions at random."""
    shape = SHAPES[random.choice(sorted(SHAPES))]
    if shape.latent is None and shape.positions == "rope":
        kv_heads = random.choice((1, 2, 4))
        head_dim = random.choice((4, 8, 16))
        shape = replace(
            shape,
            kv_heads=kv_heads,
            heads=kv_heads * random.choice((1, 2, 3)),
            head_dim=head_dim,
            rope_theta=random.choice((1e4, 1e6)),
            norm_eps=random.choice((1e-5, 1e-6)),
        )
        if shape.experts is None and not shape.qk_norm and not shape.output_bias:
            shape = replace(shape, window=random.choice((None, 5)) if not shape.mlp_bias else None)
        if shape.qkv_bias:
            # Qwen 2 has no width of heads of its own, and Llama wants whole ones.
            shape = replace(shape, hidden=shape.heads * shape.head_dim)
    if isinstance(shape.experts, Experts) and shape.latent is None:
        experts = replace(shape.experts, num_experts=random.choice((2, 4, 6)), top_k=2)
        shape = replace(shape, experts=experts)
    return replace(
        shape,
        layers=random.choice((2, 3)),
        vocab=random.choice((64, 65, 97)),
        tied=random.choice((True, False)),
    )


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(one, marks=pytest.mark.slow) for one in range(6, 200))]
)
def test_random_models_leave_and_come_back(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    shape = random_shape(random)
    tensors = drawn(shape, seed)
    out = exported(tmp_path, shape, tensors, seed=seed, file_bytes=random.choice((9_000, 10**9)))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens_T = torch.randint(0, shape.vocab, (9,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        theirs = model(tokens_T[None]).logits[0]
    ours = our_logits(shape, tensors, tokens_T)
    require_close(theirs, ours)
    for key, tensor in back(out, shape).items():
        assert torch.equal(tensor, tensors[key]), key


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors = drawn(NANO, 0)
    del tensors["norm.weight"]
    index = stored(tmp_path / "checkpoint", tensors, 0)
    parts = folder_tensors(NANO, hub_config(NANO).architecture)
    with pytest.raises(CheckpointError, match=r"it lacks norm\.weight"):
        open_model(tmp_path / "checkpoint", index, parts)
