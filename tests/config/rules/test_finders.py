"""What must hold between settings: each rule, the place it names, and values that do work."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import ConfigError
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
        (
            ["model.head_dim=5"],
            "rope-needs-even-head",
            ("model.head_dim = 4", "model.head_dim = 6"),
        ),
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
    assert set(works) <= set(found[rule].suggestions)
    assert found[rule].set_by != ""


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


def test_a_value_equal_to_the_default_is_no_error(small: Path) -> None:
    sets = ["mesh.sequence_parallel=false", "recompute.every=1", "context.kind=ring"]
    assert problems_of(small, sets) == {}


def test_muon_updates_matrices_of_experts_too() -> None:
    assert problems_of("mixtral-8x7b", ["optimizer.kind=muon"]) == {}


def test_float64_throughout_is_built(small: Path) -> None:
    names = ("parameters", "gradients", "reduction", "master")
    job = load_job(small, [f"precision.{name}=fp64" for name in names])
    assert job.plan.mathematics.precision.parameters == "fp64"


def test_experts_with_gelu_are_refused_by_train_and_prove() -> None:
    job = load_job("mixtral-8x7b", ["model.activation=gelu"])
    with pytest.raises(ConfigError) as caught:
        require_trainable(job.plan, job.sources)
    assert caught.value.rules == ("not-built-yet",)
    assert caught.value.problems[0].key == "model.activation"
    assert caught.value.problems[0].set_by == "--set model.activation=gelu"


@pytest.mark.parametrize("preset", ["llama3.1-405b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_other_shapes_can_be_proven_and_trained(preset: str) -> None:
    require_trainable(load_job(preset).plan)
