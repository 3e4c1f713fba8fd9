"""A configuration of torchtitan that is Python is parsed, never run, and read as its TOML is."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.importer import import_file
from echelon.interop.torchtitan.python_config import parse_python, split_function

# The settings of three configurations of models/llama3/config_registry.py (torchtitan 0.3), as
# facts, and what must never be run.
REGISTRY = '''
import sys

sys.exit("this was run")


def llama3_8b() -> Trainer.Config:
    """Say it."""
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        profiling=ProfilingConfig(enable_profiling=True, profile_freq=100),
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
        validator=Validator.Config(freq=500, steps=1200),
    )


def llama3_8b_cut() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2)
    config.optimizer.lr = 1e-4
    return config


def llama3_405b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("405B"),
        model_converters=ModelConvertersContainer.Config(
            converters=[Float8LinearConverter.Config(filter_fqns=["output"])]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=600),
        training=TrainingConfig(local_batch_size=2, seq_len=8192, steps=3000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
    )


def helper() -> int:
    return 1
'''


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "llama3" / "config_registry.py"
    path.parent.mkdir()
    path.write_text(REGISTRY, encoding="utf-8")
    return path


def named(path: Path, function: str) -> Path:
    return path.with_name(f"{path.name}:{function}")


def test_a_function_is_named_behind_its_file(registry: Path) -> None:
    assert split_function(named(registry, "llama3_8b")) == (registry, "llama3_8b")
    assert split_function(registry) == (registry, "")
    for path in (registry, named(registry, "helper"), named(registry, "llama3_9b")):
        with pytest.raises(ConfigError) as caught:
            import_file(path)
        assert caught.value.rules == ("import-kind",)
        names = [one.rpartition(":")[2] for one in caught.value.problems[0].suggestions]
        assert names == ["llama3_8b", "llama3_8b_cut", "llama3_405b"]


def test_a_configuration_is_the_run_of_its_toml(registry: Path) -> None:
    found = import_file(named(registry, "llama3_8b"), ranks=8)
    assert found.kind == "torchtitan"
    plan = found.job.plan
    assert plan.model.name == "llama3.1-8b"
    assert (plan.mesh.dp_shard, plan.layout.zero.stage) == (8, 3)
    assert plan.mathematics.optimizer.learning_rate == 3e-4
    assert (plan.mathematics.sequence_length, plan.layout.microbatch_sequences) == (8192, 1)
    assert found.refused == ()


def test_a_function_may_begin_with_another_and_change_it(registry: Path) -> None:
    plan = import_file(named(registry, "llama3_8b_cut"), ranks=8).job.plan
    assert (plan.mesh.tp, plan.mesh.dp_shard) == (2, 4)
    assert plan.mathematics.optimizer.learning_rate == 1e-4


def test_what_changes_the_numbers_is_refused_by_name(registry: Path) -> None:
    found = import_file(named(registry, "llama3_405b"), ranks=8)
    assert [row.key for row in found.rows if row.fate == "refused"] == ["model.converters"]
    assert found.settings["mesh.tp"].value == 8
    assert found.settings["optimizer.warmup_steps"].value == 600


def test_what_is_not_plain_is_a_key_with_its_text() -> None:
    text = """
def qwen3_8b() -> Trainer.Config:
    spec = model_registry("8B")
    for layer in spec.model.layers:
        layer.mask = "block_causal"
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLoss(factor=2),
        training=TrainingConfig(seq_len=4 * length, steps=-1),
        optimizer=OptimizersInBackwardContainer.Config(lr=1e-3),
    )
"""
    keys = parse_python(Path("qwen3/config_registry.py"), text)
    assert (keys["model.name"], keys["model.flavor"]) == ("qwen3", "8B")
    assert keys["loss"] == "ChunkedLoss(factor=2)"
    assert keys["training.seq_len"] == "4 * length"
    assert keys["training.steps"] == -1
    assert keys["optimizer.early_step_in_backward"] is True
    assert str(keys["(line 4)"]).startswith("for layer in spec.model.layers:")


def test_arguments_and_places_that_are_not_followed_are_keys_with_their_text() -> None:
    text = """
def llama3_8b() -> Trainer.Config:
    config = Trainer.Config(model_spec=model_registry("8B", attn_backend="varlen"))
    config.model_spec.layers = 4
    return config
"""
    keys = parse_python(Path("llama3/config_registry.py"), text)
    assert keys["model.flavor"] == "model_registry('8B', attn_backend='varlen')"
    assert keys["(line 4)"] == "config.model_spec.layers = 4"


def test_what_is_no_python_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_python(Path("a.py"), "def f() -> Trainer.Config:\n  return (")
    assert caught.value.rules == ("import-syntax",)
