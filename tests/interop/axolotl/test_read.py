"""An Axolotl YAML becomes a run, or names what would train something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports

TEXT = """
base_model: Qwen/Qwen3-0.6B
dp_shard_size: 2
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {offload_params: false, reshard_after_forward: true}
datasets: [{path: some/text, type: completion}]
sequence_len: 128
sample_packing: true
gradient_accumulation_steps: 1
micro_batch_size: 1
max_steps: 20
optimizer: adamw_torch_fused
lr_scheduler: constant_with_warmup
learning_rate: 2e-6
warmup_steps: 2
bf16: true
gradient_checkpointing: true
"""
WEIGHTS = ["train.weights=weights"]


@pytest.fixture
def axolotl(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "axolotl")


def test_its_degrees_are_the_mesh(axolotl: Imports) -> None:
    plan = axolotl(TEXT, sets=WEIGHTS).job.plan
    mesh = plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.world_size) == (2, 2, 2, 8)
    assert (plan.layout.zero.stage, plan.mathematics.global_sequences) == (3, 4)
    assert (plan.mathematics.documents, plan.layout.recompute.policy) == ("separate", "full")
    optimizer = plan.mathematics.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.learning_rate) == (
        "constant",
        2,
        2e-6,
    )


@pytest.mark.parametrize(
    ("kind", "given", "counts"),
    [
        ("completion", "train_on_inputs: false\n", "all"),
        ("chat_template", "", "answers"),
        ("chat_template", "train_on_inputs: true\n", "all"),
        ("alpaca", "train_on_inputs: false\n", "answers"),
    ],
)
def test_prompts_of_chats_do_not_count(
    axolotl: Imports, kind: str, given: str, counts: str
) -> None:
    found = axolotl(TEXT.replace("type: completion", f"type: {kind}") + given, sets=WEIGHTS)
    assert found.job.data.train_on == counts
    told = [what for what in found.assumptions if "data.source is a file of chats" in what]
    assert len(told) == (counts == "answers")


@pytest.mark.parametrize(
    ("named", "targets"),
    [
        ("lora_target_linear: true", ("q", "k", "v", "o", "gate", "up", "down")),
        ("lora_target_modules: [v_proj, q_proj]", ("q", "v")),
    ],
)
def test_adapters(axolotl: Imports, named: str, targets: tuple[str, ...]) -> None:
    told = f"{TEXT}adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.0\n{named}\n"
    lora = axolotl(told, sets=WEIGHTS).job.plan.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (16, 32.0, targets)


def test_ranks_must_be_those_of_the_degrees(axolotl: Imports) -> None:
    ((rule, where),) = axolotl.refused(TEXT, ranks=16, sets=WEIGHTS)
    assert (rule, where) == ("import-conflict", "dp_replicate_size, dp_shard_size, --ranks 16")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("adamw_torch_fused", "adamw_bnb_8bit", "optimizer"),
        ("bf16: true", "bf16: true\nadapter: lora\nlora_r: 8", "lora_alpha"),
        ("bf16: true", "bf16: true\nadapter: qlora\nlora_r: 8", "adapter"),
        (
            "bf16: true",
            "bf16: true\nadapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_dropout: 0.1",
            "lora_dropout",
        ),
        ("bf16: true", "bf16: true\nload_in_4bit: true", "load_in_4bit"),
        ("max_steps: 20", "num_epochs: 2", "num_epochs"),
        ("sample_packing: true", "sample_paking: true", "sample_paking"),
    ],
)
def test_what_would_train_something_else_is_refused(
    axolotl: Imports, old: str, new: str, place: str
) -> None:
    ((_, where),) = axolotl.refused(TEXT.replace(old, new), sets=WEIGHTS)
    assert where == place


def test_a_rank_has_one_sequence_where_nothing_is_said(axolotl: Imports) -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("micro_batch_size")]
    found = axolotl("\n".join(lines), sets=WEIGHTS)
    assert found.job.plan.layout.microbatch_sequences == 1
    named = axolotl("\n".join(lines), sets=[*WEIGHTS, "batch.microbatch_sequences=2"])
    assert named.job.plan.layout.microbatch_sequences == 2
