"""What must hold between settings: each rule, the place it names, and values that do work."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.effects import require_trainable
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Optimizer
from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("sets", "rule", "works"),
    [
        (
            ["mesh.tp=8", "model.heads=6", "model.head_dim=8"],
            "tp-divides-heads",
            ("1", "2", "3", "6"),
        ),
        (["mesh.tp=4"], "tp-divides-kv-heads", ("1", "2", "3", "6")),
        (["mesh.tp=6", "model.ffn=100"], "tp-divides-ffn", ("1", "2")),
        (["model.hidden=50"], "heads-divide-hidden", ("hidden = 48", "hidden = 72")),
        (
            ["model.hidden=64", "model.kv_heads=1"],
            "heads-divide-hidden",
            ("heads = 8", "heads = 16"),
        ),
        (["model.kv_heads=5"], "kv-heads-divide-heads", ("3", "4", "6")),
        (["model.head_dim=5"], "rope-needs-even-head", ("4", "6")),
        (["batch.sequence_length=65"], "sequence-fits-positions", ("1 to 64",)),
        (["mesh.pp=8"], "layers-fill-stages", ("mesh.pp = 6",)),
        (
            ["mesh.tp=6", "mesh.sequence_parallel=true", "batch.sequence_length=20"],
            "sequence-parallel-divides-sequence",
            ("18", "24"),
        ),
        (
            ["mesh.dp_replicate=5"],
            "batch-divides",
            ("global_sequences = 45", "global_sequences = 50"),
        ),
        (
            ["batch.microbatch_sequences=5"],
            "batch-divides",
            ("global_sequences = 45", "microbatch_sequences = 4", "microbatch_sequences = 6"),
        ),
        (["pipeline.schedule=1fb1"], "schedule-known", ('pipeline.schedule = "1f1b"',)),
        (
            ["mesh.pp=6", "batch.microbatch_sequences=24"],
            "schedule-needs-microbatches",
            ("batch.microbatch_sequences = 8", 'pipeline.schedule = "gpipe"'),
        ),
        (
            ["mesh.pp=2", "pipeline.stages=[[0, 1, 2, 3, 4, 5]]"],
            "stages-match-mesh",
            ('pipeline.stages = "auto"',),
        ),
        (["optimizer.warmup_steps=2000"], "learning-rate-fits-steps", ("train.steps = 2000",)),
        (["model.vocab=256"], "vocabulary-holds-tokenizer", ("model.vocab = 257",)),
        (["data.tokenizer=bpe-512"], "vocabulary-holds-tokenizer", ("model.vocab = 512",)),
        (["mesh.tp=3", "mesh.pp=3"], "fits-cluster", ('cluster.preset = "9xcpu"',)),
        (["cluster.preset=12xh100"], "whole-nodes", ("8xh100", "16xh100")),
    ],
)
def test_a_broken_rule_names_values_that_work(
    small: Path, sets: list[str], rule: str, works: tuple[str, ...]
) -> None:
    found = problems_of(small, sets)
    assert rule in found
    assert set(works) <= set(found[rule].works)
    assert found[rule].set_by != ""


def test_every_degree_that_is_suggested_for_tp_is_accepted(small: Path) -> None:
    for value in problems_of(small, ["mesh.tp=4"])["tp-divides-kv-heads"].works:
        assert problems_of(small, [f"mesh.tp={value}"]) == {}


def test_the_vocabulary_need_not_divide(small: Path) -> None:
    assert problems_of(small, ["mesh.tp=2", "model.vocab=301"]) == {}


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ("[[0, 1, 2], [4, 5]]", "blocks 3 are in no stage"),
        ("[[0, 1, 2], [2, 3, 4, 5]]", "blocks 2 are named more than once"),
        ("[[0, 1, 2], [3, 5, 4]]", "block 5 stands where block 4 belongs"),
        ("[[0, 1, 2], [3, 4, 5, 6]]", "blocks 6 do not exist"),
        ("[[-1, 0, 1, 2], [3, 4, 5]]", "blocks -1 do not exist"),
        ("[[], []]", "blocks 0-5 are in no stage"),
    ],
)
def test_explicit_stages_hold_each_block_once_in_order(small: Path, stages: str, says: str) -> None:
    found = problems_of(small, ["mesh.pp=2", f"pipeline.stages={stages}"])
    assert list(found) == ["stages-cover-layers"]
    assert says in found["stages-cover-layers"].message


@pytest.mark.parametrize(
    ("stages", "counts"),
    [("[[0], [1, 2, 3, 4, 5]]", (1, 5)), ("[[0, 1, 2, 3, 4, 5], []]", (6, 0))],
)
def test_explicit_stages_may_be_uneven_or_empty(
    small: Path, stages: str, counts: tuple[int, ...]
) -> None:
    job = load_job(small, ["mesh.pp=2", f"pipeline.stages={stages}"])
    assert tuple(map(len, job.plan.layout.pipeline.stages)) == counts


@pytest.mark.parametrize("ranks", [1, 6, 7, 12, 64])
def test_a_wrong_world_size_lists_the_nearest_meshes_that_work(small: Path, ranks: int) -> None:
    sets = ["mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2", "cluster.preset=64xcpu"]
    assert problems_of(small, sets, world_size=8) == {}
    found = problems_of(small, sets, world_size=ranks)
    assert list(found) == ["world-size-is-product"]
    problem = found["world-size-is-product"]
    assert f"{ranks} ranks were started" in problem.message
    assert problem.message.endswith("= 8")
    *meshes, last = problem.works
    assert last == "8 ranks"
    assert len(meshes) == {1: 1, 6: 4, 7: 0, 12: 4, 64: 2}[ranks]
    for mesh in meshes:
        degrees = [part.split() for part in mesh.split(" x ")]
        again = [f"mesh.{axis}={degree}" for axis, degree in degrees] + sets[3:]
        assert problems_of(small, again, world_size=ranks) == {}


@pytest.mark.parametrize(
    "sets",
    [
        ["mesh.sequence_parallel=true"],
        ["zero.bucket_bytes=1000"],
        ["context.kind=ulysses"],
        ["mesh.dp_shard=2"],
        ["recompute.every=2"],
        ["recompute.offload=host"],
        ["optimizer.momentum=0.9"],
        ["optimizer.kind=sgd", "optimizer.newton_schulz_steps=6"],
        ["optimizer.kind=sgd", "optimizer.beta1=0.8"],
        ["optimizer.kind=sgd", "optimizer.beta2=0.9"],
        ["optimizer.kind=sgd", "optimizer.eps=1e-6"],
        ["optimizer.weight_decay=0", "optimizer.decay=all"],
        ["optimizer.decay_steps=10"],
        ["optimizer.schedule=wsd"],
        ["optimizer.schedule=constant", "optimizer.final_ratio=0.5"],
        ["train.validation_batches=3"],
        ["checkpoint.keep=5"],
        ["experts.capacity_factor=1.25"],
        ["model.positions=learned", "model.rope_theta=5e5"],
    ],
)
def test_a_setting_without_effect_is_an_error(small: Path, sets: list[str]) -> None:
    found = problems_of(small, sets)
    assert list(found) == ["no-effect"]
    assert found["no-effect"].set_by.startswith("--set ")


def test_rotary_scaling_of_learned_positions_has_no_effect() -> None:
    found = problems_of("llama3.1-405b", ["model.positions=learned", "model.rope_theta=10000"])
    assert list(found) == ["no-effect"]
    assert "[model.rope_scaling] changes nothing" in found["no-effect"].message


def test_a_value_equal_to_the_default_is_no_error(small: Path) -> None:
    sets = ["mesh.sequence_parallel=false", "recompute.every=1", "context.kind=ring"]
    assert problems_of(small, sets) == {}


@pytest.mark.parametrize(
    "setting",
    [
        "recompute.policy=selective",
    ],
)
def test_what_is_not_built_yet_is_refused(small: Path, setting: str) -> None:
    found = problems_of(small, [setting])
    assert list(found) == ["not-built-yet"]
    assert found["not-built-yet"].key == setting.partition("=")[0]
    assert found["not-built-yet"].works != ()


def test_each_optimizer_takes_what_it_uses(small: Path) -> None:
    momentum = ["optimizer.momentum=0.9"]
    moments = ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.eps=1e-6"]
    steps = ["optimizer.newton_schulz_steps=6", "optimizer.decay=blocks"]
    for kind, sets in (
        ("adamw", moments),
        ("sgd", momentum),
        ("muon", [*momentum, *moments, *steps]),
    ):
        optimizer = load_job(small, [f"optimizer.kind={kind}", *sets]).plan.mathematics.optimizer
        assert optimizer.kind == kind
        changed = {text.removeprefix("optimizer.").partition("=")[0] for text in sets}
        default = Optimizer()
        assert all(getattr(optimizer, name) != getattr(default, name) for name in changed)


def test_muon_updates_matrices_of_experts_too() -> None:
    assert problems_of("mixtral-8x7b", ["optimizer.kind=muon"]) == {}


def test_stored_inputs_of_recomputed_blocks_may_wait_on_the_host(small: Path) -> None:
    job = load_job(small, ["recompute.policy=full", "recompute.offload=host"])
    assert job.plan.layout.recompute.offload == "host"


def test_float64_throughout_is_built(small: Path) -> None:
    names = ("parameters", "gradients", "reduction", "master")
    job = load_job(small, [f"precision.{name}=fp64" for name in names])
    assert job.plan.mathematics.precision.parameters == "fp64"


def test_a_gate_with_gelu_is_refused_by_train_and_prove() -> None:
    job = load_job("llama3-8b", ["model.activation=gelu"])
    with pytest.raises(ConfigError) as caught:
        require_trainable(job.plan, job.sources)
    assert caught.value.rules == ("not-built-yet",)
    assert caught.value.problems[0].key == "model.activation"
    assert caught.value.problems[0].set_by == "--set model.activation=gelu"


@pytest.mark.parametrize("preset", ["llama3.1-405b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_other_shapes_can_be_proven_and_trained(preset: str) -> None:
    require_trainable(load_job(preset).plan)


@pytest.mark.parametrize(
    "sets",
    [
        ["model.experts.top_k=9"],
        ["model.experts.first_dense_layers=32"],
    ],
)
def test_there_are_experts_enough(sets: list[str]) -> None:
    assert list(problems_of("mixtral-8x7b", sets)) == ["experts-enough"]


def test_rotary_scaling_has_a_middle() -> None:
    found = problems_of("llama3.1-405b", ["model.rope_scaling.low_frequency_factor=4"])
    assert list(found) == ["rope-scaling-order"]
