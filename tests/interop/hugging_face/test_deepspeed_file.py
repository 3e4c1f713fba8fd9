"""A JSON of DeepSpeed beside a Trainer: "auto" is the Trainer's, and sizes must be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.interop.importer import Imported, import_file
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


def imported(folder: Path, file: dict[str, Any], text: str = PRETRAIN) -> Imported:
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
