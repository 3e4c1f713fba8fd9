"""A nanotron YAML becomes a run, or names what would be other mathematics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports, set_by

SMALL = """
tokens:
  {micro_batch_size: 2, batch_accumulation_per_replica: 2, sequence_length: 32, train_steps: 50}
parallelism: {dp: 2, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, pp_engine: 1f1b}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 64
  init_method: {std: 0.025}
  model_config:
    is_llama_config: true
    hidden_act: silu
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 64
    tie_word_embeddings: true
    vocab_size: 300
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 1
  learning_rate_scheduler:
    {learning_rate: 1.0e-3, lr_warmup_steps: 5, lr_decay_style: cosine, min_decay_lr: 1.0e-4}
"""


@pytest.fixture
def nanotron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "nanotron")


def test_mesh_batch_model_and_rate(nanotron: Imports) -> None:
    found = nanotron(SMALL)
    plan = found.job.plan
    assert (plan.mesh.dp_shard, plan.mesh.tp, plan.layout.zero.stage) == (2, 2, 1)
    assert plan.mathematics.global_sequences == 8
    assert (plan.model.vocab, plan.model.kv_heads, plan.model.gated) == (320, 2, True)
    precision, optimizer = plan.mathematics.precision, plan.mathematics.optimizer
    assert (precision.parameters, precision.gradients, precision.master) == ("bf16", "fp32", "fp32")
    assert (optimizer.schedule, optimizer.warmup_steps) == ("cosine", 5)
    assert optimizer.final_ratio == pytest.approx(0.1)
    assert set_by(found, "parallelism.tp_mode") == {"mesh.sequence_parallel": True}


def test_a_flat_part_is_a_schedule_of_its_own(nanotron: Imports) -> None:
    text = SMALL.replace(
        "lr_decay_style: cosine", "lr_decay_style: linear, lr_decay_starting_step: 40"
    )
    optimizer = nanotron(text).job.plan.mathematics.optimizer
    assert (optimizer.schedule, optimizer.decay_steps) == ("wsd", 10)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("lr_decay_style: cosine", "lr_decay_style: 1-sqrt", "lr_decay_style"),
        ("lr_warmup_steps: 5", "lr_warmup_steps: 5, lr_decay_steps: 10", "lr_decay_steps"),
        ("hidden_act: silu", "hidden_act: relu", "hidden_act"),
        ("zero_stage: 1", "zero_stag: 1", "zero_stag"),
    ],
)
def test_what_is_refused_is_named(nanotron: Imports, old: str, new: str, place: str) -> None:
    ((_, where),) = nanotron.refused(SMALL.replace(old, new))
    assert where.endswith(place)


def test_ranks_are_those_of_the_file(nanotron: Imports) -> None:
    ((rule, where),) = nanotron.refused(SMALL, ranks=8)
    assert (rule, where) == ("import-conflict", "parallelism.dp, --ranks 8")
