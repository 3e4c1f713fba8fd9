"""The DeepSpeed plugin of an Accelerate YAML: stages 1 to 3 without a file of DeepSpeed's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports, rows_of

# What `accelerate config` writes for ZeRO 2 on two ranks.
WRITTEN = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


@pytest.fixture
def accelerate(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "accelerate")


def test_what_accelerate_config_writes(accelerate: Imports) -> None:
    found = accelerate(WRITTEN)
    plan = found.job.plan
    zero, precision = plan.layout.zero, plan.mathematics.precision
    assert (zero.stage, zero.optimizer_offload, plan.mesh.dp_shard) == (2, "host", 2)
    assert plan.mathematics.optimizer.clip_norm == 0.5
    assert plan.num_microbatches == 2
    roles = (precision.parameters, precision.gradients, precision.reduction, precision.master)
    assert roles == ("bf16", "bf16", "bf16", "fp32")
    (row,) = rows_of(found, "deepspeed_config.zero3_init_flag")
    assert "its own slices" in row.why


def test_files_of_an_offload(accelerate: Imports, tmp_path: Path) -> None:
    more = f"offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: {tmp_path}"
    plan = accelerate(WRITTEN.replace("offload_optimizer_device: cpu", more)).job.plan
    assert (plan.layout.zero.optimizer_offload, plan.layout.zero.offload_dir) == (
        "nvme",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("old", "new", "rule", "where"),
    [
        ("zero_stage: 2", "zero_stage: 4", "out-of-range", "zero_stage"),
        ("zero_stage: 2", "zero_stagee: 2", "import-unknown-key", "zero_stagee"),
        ("zero_stage: 2", "deepspeed_config_file: a.json", "import-not-honoured", "config_file"),
    ],
)
def test_what_is_refused_is_named(
    accelerate: Imports, old: str, new: str, rule: str, where: str
) -> None:
    found = accelerate.refused(WRITTEN.replace(old, new))
    assert any(one == rule and place.endswith(where) for one, place in found), found
