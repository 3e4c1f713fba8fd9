"""A family is known by its keys, and norms of Gemma have an offset in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.core.errors import CheckpointError
from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters, router_biases
from echelon.interop.weight_names.names import find_naming
from echelon.interop.weight_names.source import HeadRows, RotaryPairs
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.parallel.layouts import NANO, plan_of
from tests.training.weights import ranks
from tests.training.weights.rectangles import require_rectangles
from tests.training.weights.transformers_models import (
    DEEPSEEK,
    DENSE_DEEPSEEK,
    MIXTRAL,
    SHAPES,
    Tensors,
    original,
)

KEYS = {
    "Llama": "model.embed_tokens.weight",
    "GPT-NeoX": "gpt_neox.embed_in.weight",
    "Falcon": "transformer.word_embeddings.weight",
    "GPT-2": "transformer.wte.weight",
    "Echelon": "embedding.weight",
}

FUSED = pytest.mark.parametrize("fused", [False, True], ids=["each expert", "fused"])
NAMED = pytest.mark.parametrize("name", SHAPES)


@pytest.mark.parametrize("kind", KEYS)
def test_the_embedding_says_the_family(kind: str) -> None:
    naming = find_naming(NANO, [KEYS[kind]])
    assert naming is not None
    assert naming.kind == kind


def test_norms_have_the_offset_of_the_shape_in_files_of_others_alone() -> None:
    shape = replace(NANO, norm_offset=1.0)
    for kind, offset in (("Llama", 1.0), ("Echelon", 0.0)):
        naming = find_naming(shape, [KEYS[kind]])
        assert naming is not None
        for spec in parameters(shape):
            expected = offset if spec.name.endswith("norm.weight") else 0.0
            assert naming.sources[spec.name].offset == expected


def test_unknown_keys_are_no_family() -> None:
    assert find_naming(NANO, ["encoder.weight"]) is None


def rows_of(order: HeadRows, count: int) -> list[int]:
    return [r.there + i * r.step for r in order.runs(0, count) for i in range(r.count)]


@pytest.mark.parametrize("turned", [0, 2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_row_of_a_head_is_taken_once(turned: int, interleaved: bool) -> None:
    order = HeadRows(width=8, turned=turned, interleaved=interleaved and turned > 0)
    rows = rows_of(order, 24)
    assert sorted(rows) == list(range(24))
    for first in range(24):
        runs = list(order.runs(first, 24 - first))
        assert [r.there + i * r.step for r in runs for i in range(r.count)] == rows[first:]


def test_halves_of_a_part_become_halves_of_the_head() -> None:
    assert rows_of(HeadRows(width=8, turned=4), 8) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert rows_of(HeadRows(width=8, turned=4, interleaved=True), 8) == [0, 2, 4, 5, 1, 3, 6, 7]


def test_queries_keys_and_values_of_a_key_head_are_together() -> None:
    """Two queries to a key head: q q k v, q q k v."""
    q = HeadRows(width=2, heads=2, group_rows=8)
    k, v = (HeadRows(width=2, group_rows=8, start=start) for start in (4, 6))
    assert rows_of(q, 8) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert rows_of(k, 4) == [4, 5, 12, 13]
    assert rows_of(v, 4) == [6, 7, 14, 15]


def loaded(path: Path, shape: ModelShape) -> Tensors:
    """Return all parameters of a file, and the biases of routers, by canonical name."""
    specs = (*parameters(shape), *router_biases(shape))
    whole = {spec.name: torch.full(spec.shape, 7.0) for spec in specs}
    wanted = {
        name: [Shard(name=name, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
        for name, t in whole.items()
    }
    load_weights(find_weights(path, shape), wanted, SingleRankCommunicator())
    return whole


def expert(held: Mapping[str, torch.Tensor], layer: int, number: int) -> Tensors:
    """Return the matrices of an expert out of the two tensors of its block."""
    home = f"model.layers.{layer}.mlp.experts"
    gate, up = held[f"{home}.gate_up_proj"][number].chunk(2)
    return {"gate": gate, "up": up, "down": held[f"{home}.down_proj"][number]}


@FUSED
@NAMED
def test_every_expert_gets_its_matrices(name: str, fused: bool, tmp_path: Path) -> None:
    shape, model = SHAPES[name], original(SHAPES[name])
    assert shape.experts is not None
    held, whole = model.tensors, loaded(model.save(tmp_path, fused=fused), shape)
    keys = set(load_file(tmp_path / "model.safetensors"))
    assert any(key.endswith("gate_up_proj") for key in keys) == fused
    assert any(".block_sparse_moe." in key for key in keys) == (name == "mixtral" and not fused)
    for layer in filter(shape.layer_has_experts, range(shape.layers)):
        mlp, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        assert torch.equal(whole[f"{mlp}.router.weight"], held[f"{theirs}.gate.weight"])
        for number in range(shape.experts.num_experts):
            for part, matrix in expert(held, layer, number).items():
                assert torch.equal(whole[f"{mlp}.experts.{number}.{part}.weight"], matrix)
        if shape.experts.shared_experts:
            for part in ("gate", "up", "down"):
                their = held[f"{theirs}.shared_experts.{part}_proj.weight"]
                assert torch.equal(whole[f"{mlp}.shared.{part}.weight"], their)
            bias = held[f"{theirs}.gate.e_score_correction_bias"]
            assert torch.equal(whole[f"{mlp}.router.bias"], bias)
    assert not any(bool((tensor == 7.0).all()) for tensor in whole.values())


@FUSED
@NAMED
def test_any_rectangle_is_read(name: str, fused: bool, tmp_path: Path) -> None:
    shape, random = SHAPES[name], Random(name)
    # A buffer of a few rows makes blocks of them, and must grow for longer ones.
    original(shape).save(tmp_path, fused=fused)
    whole = loaded(tmp_path, shape)
    require_rectangles(tmp_path, shape, whole, random, count=4, buffer_bytes=300)


@pytest.mark.parametrize("name", [*SHAPES, DENSE_DEEPSEEK.name])
def test_the_model_computes_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    shape = {**SHAPES, DENSE_DEEPSEEK.name: DENSE_DEEPSEEK}[name]
    model, decoder = original(shape), Decoder(shape)
    whole = loaded(model.save(tmp_path, fused=False), shape)
    biases = {spec.layer: whole.pop(spec.name) for spec in router_biases(shape)}
    decoder.load_state_dict(whole)
    decoder.operations.routing.biases = {n: one for n, one in biases.items() if n is not None}
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(0, shape.vocab, (2, 11), generator=generator)
    batch = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.arange(2))
    with torch.no_grad():
        out_ND = decoder.norm(decoder.hidden(None, batch))
        ours = decoder.operations.logits(out_ND, decoder.head_weight).view(11, 2, -1)
        theirs = model.model(tokens_BT).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours.transpose(0, 1), theirs, rtol=1e-5, atol=1e-5)


@FUSED
@pytest.mark.parametrize(("tp", "expert_tp"), [(1, 1), (2, 1), (2, 2)])
def test_every_rank_of_a_run_gets_its_experts(
    rank_pool: RankPool, fused: bool, tp: int, expert_tp: int, tmp_path: Path
) -> None:
    shape = DEEPSEEK
    plan = ranks.mixed(plan_of(dp_shard=2, tp=tp, model=shape), 1)
    layout = replace(
        plan.layout,
        mesh=replace(plan.mesh, ep=2),
        experts=ExpertLayout(expert_tp=expert_tp),
    )
    original(shape).save(tmp_path, fused=fused)
    whole = loaded(tmp_path, shape)
    found: dict[str, int] = {}
    argument = (replace(plan, layout=layout), tmp_path)
    for shards in rank_pool.run(ranks.load, argument, world_size=2 * tp):
        for shard in shards:
            at = tuple(
                slice(start, start + size)
                for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
            )
            assert torch.equal(shard.tensor, whole[shard.name][at].to(shard.tensor.dtype))
            if shard.primary and shard.tensor.dtype == torch.float32:
                found[shard.name] = found.get(shard.name, 0) + shard.tensor.numel()
    assert found == {spec.name: spec.numel for spec in parameters(shape)}


def test_rows_of_pairs_are_each_taken_once() -> None:
    pairs = RotaryPairs(period=10, start=6)
    order = [run.there + i * run.step for run in pairs.runs(0, 20) for i in range(run.count)]
    assert order == [*range(6), 6, 8, 7, 9, *range(10, 16), 16, 18, 17, 19]
    for first in range(20):
        for count in range(20 - first):
            runs = list(pairs.runs(first, count))
            assert [r.here for r in runs] == [
                first + sum(r.count for r in runs[:i]) for i in range(len(runs))
            ]
            rows = [run.there + i * run.step for run in runs for i in range(run.count)]
            assert rows == order[first : first + count]


def problems(path: Path, shape: ModelShape) -> dict[str, str]:
    """Return the messages about a file that does not fit, by rule."""
    with pytest.raises(CheckpointError) as caught:
        find_weights(path, shape)
    return {problem.rule: problem.message for problem in caught.value.problems}


def test_layers_that_predict_more_tokens_are_passed_over(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in original(DEEPSEEK).tensors.items()}
    extra = ("eh_proj.weight", "enorm.weight", "embed_tokens.weight", "mlp.gate.weight")
    after = {f"model.layers.3.{name}": torch.ones(2) for name in extra}
    save_file({**after, **tensors}, tmp_path / "model.safetensors")
    assert set(find_weights(tmp_path, DEEPSEEK).sources) >= {"embedding.weight"}
    whole = loaded(tmp_path, DEEPSEEK)
    assert torch.equal(whole["embedding.weight"], tensors["model.embed_tokens.weight"])
    # A block of the model itself is not one of them: nothing is dropped in silence.
    shorter = replace(DEEPSEEK, layers=2)
    found = problems(tmp_path, shorter)
    assert "model.layers.2." in found["weights-known"]
    assert "model.layers.3." not in found["weights-known"]


def test_biases_of_routers_are_all_there_or_none(tmp_path: Path) -> None:
    file, tensors = tmp_path / "model.safetensors", original(DEEPSEEK).tensors
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    none = {name: tensor for name, tensor in tensors.items() if name not in biases}
    save_file(none, file)
    names = set(find_weights(tmp_path, DEEPSEEK).sources)
    assert names == {spec.name for spec in parameters(DEEPSEEK)}
    save_file({**none, biases[1]: tensors[biases[1]]}, file)
    assert biases[0] in problems(tmp_path, DEEPSEEK)["weights-complete"]
    assert DEEPSEEK.experts is not None
    without = replace(DEEPSEEK, experts=replace(DEEPSEEK.experts, router_bias=False))
    assert biases[1] in problems(tmp_path, without)["weights-known"]


def test_our_own_names_have_experts_and_biases(tmp_path: Path) -> None:
    specs = (*parameters(DEEPSEEK), *router_biases(DEEPSEEK))
    tensors = {spec.name: torch.randn(spec.shape) for spec in specs}
    save_file(tensors, tmp_path / "model.safetensors")
    whole = loaded(tmp_path, DEEPSEEK)
    assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())


@FUSED
def test_files_of_other_experts_are_refused(fused: bool, tmp_path: Path) -> None:
    original(MIXTRAL).save(tmp_path, fused=fused)
    assert MIXTRAL.experts is not None
    more = replace(MIXTRAL, experts=replace(MIXTRAL.experts, num_experts=6))
    found = problems(tmp_path, more)
    assert ("weights-shape" if fused else "weights-complete") in found
    wider = replace(MIXTRAL, experts=replace(MIXTRAL.experts, ffn=16))
    sizes = "[4, 24, 16] there, [4, 32, 16]" if fused else "[12, 16] there, [16, 16]"
    assert f"{sizes} here" in problems(tmp_path, wider)["weights-shape"]
    dense = replace(MIXTRAL, experts=None)
    assert set(problems(tmp_path, dense)) == {"weights-complete", "weights-known"}
