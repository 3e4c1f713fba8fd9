"""A JSON of DeepSpeed beside a Trainer: "auto" is the Trainer's, and sizes must be the same."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from echelon.interop.importer import ImportedRun, import_file
from tests.interop.axolotl.test_read import TEXT
from tests.interop.llamafactory.test_read import PRETRAIN, WEIGHTS

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "steps_per_print": 7,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
}


def imported(folder: Path, file: dict[str, Any], text: str = PRETRAIN) -> ImportedRun:
    (folder / "ds.json").write_text(json.dumps(file), encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(f"{text}deepspeed: ds.json\n", encoding="utf-8")
    return import_file(path, ranks=4, sets=WEIGHTS)


def test_what_is_auto_is_what_the_trainer_says(tmp_path: Path) -> None:
    found = imported(tmp_path, AUTO)
    plan = found.job.plan
    assert (plan.layout.zero.stage, plan.mesh.dp_shard) == (3, 4)
    assert (plan.mathematics.global_sequences, plan.num_microbatches) == (8, 2)
    assert plan.mathematics.optimizer.clip_norm == 1.0
    precision = plan.mathematics.precision
    # DeepSpeed computes and sums in half, where the Trainer alone has autocast.
    assert (precision.parameters, precision.gradients, precision.master) == ("bf16", "bf16", "fp32")
    assert not any("imported by itself" in what for what in found.assumptions)
    # Ten times the width of the model that the file names, and not of a base.
    assert plan.layout.zero.keep_whole_below == 10 * plan.model.hidden + 1
    assert "observe.log_every" not in found.settings


def test_without_a_word_for_clipping_deepspeed_does_not_clip(tmp_path: Path) -> None:
    file = {key: value for key, value in AUTO.items() if key != "gradient_clipping"}
    found = imported(tmp_path, file)
    assert found.job.plan.mathematics.optimizer.clip_norm is None
    (row,) = [row for row in found.rows if row.key == "max_grad_norm"]
    assert row.why == "ds.json says optimizer.clip_norm, and is what counts"


def test_sizes_of_a_batch_are_those_of_the_trainer_or_it_stops(tmp_path: Path) -> None:
    same = imported(tmp_path, AUTO | {"gradient_accumulation_steps": 2})
    assert same.is_whole
    other = imported(tmp_path, AUTO | {"gradient_accumulation_steps": 4})
    assert [row.key for row in other.rows if row.fate == "refused"] == [
        "deepspeed.gradient_accumulation_steps"
    ]
    assert "the Trainer stops, as its gradient_accumulation_steps is 2" in other.refused[0].message
    assert other.settings["batch.global_sequences"].value == 8


def test_axolotl_names_one_too(tmp_path: Path) -> None:
    lines = [
        line
        for line in TEXT.splitlines()
        if not line.startswith(("dp_", "tensor_parallel", "fsdp"))
    ]
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    text = "\n".join(lines) + "\n"
    plan = imported(tmp_path, AUTO | {"zero_optimization": offload}, text).job.plan
    assert (plan.layout.zero.stage, plan.layout.zero.optimizer_offload) == (2, "host")
    assert plan.mesh.dp_shard == 4


def test_a_dtype_that_is_auto_in_both_is_bf16(tmp_path: Path) -> None:
    """Axolotl's usual `bf16: auto`: the GPU can, so it is on."""
    lines = [
        line
        for line in TEXT.splitlines()
        if not line.startswith(("dp_", "tensor_parallel", "fsdp", "bf16", "fp16"))
    ]
    text = "\n".join([*lines, "bf16: auto"]) + "\n"
    precision = imported(tmp_path, AUTO, text).job.plan.mathematics.precision
    assert (precision.parameters, precision.reduction, precision.master) == ("bf16", "bf16", "fp32")


OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
SCHEDULER = {
    "type": "WarmupCosineLR",
    "params": {
        "warmup_max_lr": 2e-5,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "total_num_steps": 40,
    },
}
SAID = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "zero_optimization": {"stage": 2},
}
OTHERWISE: dict[str, object] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16.enabled": False,
    "fp16.enabled": True,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_max_lr": 1e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}
"""What no Trainer with the arguments of these tests has."""


def saying(key: str, value: object) -> dict[str, Any]:
    """Return the file whose every number is the Trainer's, but for one."""
    file = json.loads(json.dumps(SAID))
    *tables, name = key.split(".")
    place = file
    for table in tables:
        place = place[table]
    place[name] = value
    return file


def compared_by_transformers() -> set[str]:
    """Return the keys that the Trainer compares with its own, as its source has them."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "integrations" / "deepspeed.py"
    return {
        str(ast.literal_eval(node.args[0]))
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "fill_match"
    }


def test_a_file_that_says_what_the_trainer_says_is_whole(tmp_path: Path) -> None:
    found = imported(tmp_path, SAID)
    assert found.is_whole
    optimizer = found.job.plan.mathematics.optimizer
    assert (optimizer.learning_rate, optimizer.clip_norm) == (2e-5, 1.0)


def test_every_key_that_transformers_compares_is_compared() -> None:
    assert compared_by_transformers() == set(OTHERWISE)


@pytest.mark.parametrize("key", OTHERWISE)
def test_where_the_trainer_stops_the_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    found = imported(tmp_path, saying(key, OTHERWISE[key]))
    refused = [row.key for row in found.rows if row.fate == "refused"]
    assert refused == [f"deepspeed.{key}"]
    (problem,) = found.refused
    assert f"{key} = {json.dumps(OTHERWISE[key])}: the Trainer stops, as its" in problem.message
    assert '"auto"' in problem.suggestions


def test_how_many_sequences_is_compared_where_the_ranks_are_known(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(saying("train_batch_size", 64)), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(f"{PRETRAIN}deepspeed: ds.json\n", encoding="utf-8")
    found = import_file(path, sets=WEIGHTS)
    assert not found.refused


@pytest.mark.parametrize(
    "more", [{}, {"fp16": {"enabled": False}}, {"bfloat16": {"enabled": False}}]
)
def test_a_half_of_the_trainer_is_that_of_a_file_without_its_table(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """The Trainer's accelerate adds the table: `set_mixed_precision`."""
    found = imported(tmp_path, {"zero_optimization": {"stage": 2}, **more})
    assert not found.refused
    precision = found.job.plan.mathematics.precision
    assert (precision.parameters, precision.gradients, precision.master) == ("bf16", "bf16", "fp32")
    assert found.settings["precision.parameters"].source == "bf16 of what reads ds.json"


def test_an_added_table_of_fp16_scales_the_loss(tmp_path: Path) -> None:
    text = PRETRAIN.replace("bf16: true", "fp16: true")
    file = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    precision = imported(tmp_path, file, text).job.plan.mathematics.precision
    assert (precision.parameters, precision.reduction) == ("fp16", "fp16")
    assert (precision.loss_scaling, precision.loss_scale) == ("dynamic", 2.0**16)


def test_no_table_is_added_where_the_trainer_is_fp32_or_the_file_has_one(tmp_path: Path) -> None:
    stage = {"zero_optimization": {"stage": 2}}
    plain = imported(tmp_path, stage, PRETRAIN.replace("bf16: true\n", ""))
    empty = imported(tmp_path, {**stage, "bf16": {}})
    old = imported(tmp_path, {**stage, "bfloat16": {"enabled": True}})
    found = [one.job.plan.mathematics.precision.parameters for one in (plain, empty, old)]
    assert found == ["fp32", "fp32", "bf16"]


def test_a_batch_that_is_not_said_is_the_default_of_the_trainer(tmp_path: Path) -> None:
    """TrainingArguments have 8 sequences of a rank, Axolotl has 1."""
    text = PRETRAIN.replace("per_device_train_batch_size: 1\n", "")
    file = AUTO | {"train_micro_batch_size_per_gpu": 8, "train_batch_size": 64}
    found = imported(tmp_path, file, text)
    assert not found.refused
    plan = found.job.plan
    assert (plan.layout.microbatch_sequences, plan.mathematics.global_sequences) == (8, 64)
    (problem,) = imported(tmp_path, AUTO | {"train_micro_batch_size_per_gpu": 1}, text).refused
    assert "its per_device_train_batch_size is 8" in problem.message


def test_sequences_of_a_step_are_counted_over_all_ranks(tmp_path: Path) -> None:
    """Two of four ranks read the same samples, and the Trainer multiplies by four."""
    text = f"{PRETRAIN}tensor_model_parallel_size: 2\n"
    assert not imported(tmp_path, AUTO | {"train_batch_size": 8}, text).refused
    (problem,) = imported(tmp_path, AUTO | {"train_batch_size": 4}, text).refused
    assert "the Trainer stops" in problem.message
    assert "is 8" in problem.message
