"""A LLaMA-Factory YAML becomes a run, or names what would train something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports

PRETRAIN = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: pt
do_train: true
finetuning_type: full
dataset: c4_demo
cutoff_len: 128
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 2e-5
max_steps: 40
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
STAGE = ["zero.stage=3", "mesh.dp_shard=4", "mesh.dp_replicate=1"]
WEIGHTS = ["train.weights=weights"]


@pytest.fixture
def factory(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "llamafactory")


def test_a_run_of_the_trainer(factory: Imports) -> None:
    plan = factory(PRETRAIN, ranks=4, sets=WEIGHTS).job.plan
    optimizer, precision = plan.mathematics.optimizer, plan.mathematics.precision
    assert plan.model.name == "qwen3-0.6b"
    assert (plan.mathematics.global_sequences, plan.mesh.dp_replicate) == (8, 4)
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.total_steps) == (2e-5, 4, 40)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.schedule) == (0.0, 1.0, "cosine")
    assert (precision.parameters, precision.gradients, precision.reduction) == (
        "bf16",
        "fp32",
        "fp32",
    )
    assert plan.layout.recompute.policy == "full"


def test_the_weights_that_it_starts_from_are_asked_for(factory: Imports) -> None:
    (problem,) = factory.problems(PRETRAIN, ranks=4)
    assert problem.suggestions == ("--set train.weights=FOLDER", "no train.weights")[:1]
    assert "the weights of Qwen/Qwen3-0.6B" in problem.message


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("stage: pt", "stage: dpo", "stage"),
        ("stage: pt", "stage: sft\ntrain_on_prompt: true", "train_on_prompt"),
        ("finetuning_type: full", "finetuning_type: freeze", "finetuning_type"),
        ("finetuning_type: full", "finetuning_type: lora\nlora_dropout: 0.1", "lora_dropout"),
        ("finetuning_type: full", "finetuning_type: lora\nlora_target: wte", "lora_target"),
        ("finetuning_type: full", "finetuning_type: lora\nlora_surprise: 1", "lora_surprise"),
        ("max_steps: 40", "num_train_epochs: 3.0", "num_train_epochs"),
        ("do_train: true", "do_train: true\nuse_galore: true", "use_galore"),
        ("bf16: true", "bf16: true\noptim: adafactor", "optim"),
        ("bf16: true", "bf16: true\nfp16: true", "fp16"),
        ("Qwen/Qwen3-0.6B", "someone/unheard-of", "model_name_or_path"),
    ],
)
def test_what_would_train_something_else_is_refused(
    factory: Imports, old: str, new: str, place: str
) -> None:
    found = factory.refused(PRETRAIN.replace(old, new), ranks=4, sets=WEIGHTS)
    assert place in [where.split(", ")[-1] for _, where in found]


def test_adapters_over_answers(factory: Imports) -> None:
    text = PRETRAIN.replace("stage: pt", "stage: sft").replace("type: full", "type: lora")
    told = f"{text}lora_rank: 4\nlora_target: q_proj,down_proj\nuse_rslora: true\n"
    found = factory(told, ranks=4, sets=WEIGHTS)
    lora = found.job.plan.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets, lora.rslora) == (4, 8.0, ("q", "down"), True)
    assert found.job.data.train_on == "answers"
    assert any("data.source is a file of chats" in what for what in found.assumptions)
    plain = factory(PRETRAIN.replace("type: full", "type: lora"), ranks=4, sets=WEIGHTS).job
    assert plain.data.train_on == "all"
    assert plain.plan.model.lora is not None
    assert (plain.plan.model.lora.rank, plain.plan.model.lora.alpha) == (8, 16.0)
    assert len(plain.plan.model.lora.targets) == 7


def test_a_file_of_deepspeed_is_imported_by_itself(factory: Imports) -> None:
    found = factory(f"{PRETRAIN}deepspeed: ds_z3.json\n", ranks=4, sets=[*WEIGHTS, *STAGE])
    assert found.job.plan.layout.zero.stage == 3
    assert any("zero.stage = 0: deepspeed" in what for what in found.assumptions)
