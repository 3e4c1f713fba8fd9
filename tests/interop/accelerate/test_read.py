"""An Accelerate YAML: FSDP 1 and 2 become ZeRO stage 3, plain replicas stage 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.interop.abilities import KeyRule
from echelon.interop.accelerate.abilities import TABLES
from echelon.interop.accelerate.read import OTHER_TYPES
from tests.interop.imports import Imports, rows_of

# What `accelerate config` writes for FSDP 1 on two machines.
WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.fixture
def accelerate(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "accelerate")


def fsdp(version: int = 1, more: str = "", **keys: Any) -> str:
    """Return a configuration of four processes with these keys of fsdp_config."""
    table = "".join(f"\n  fsdp_{key}: {value}" for key, value in keys.items())
    return (
        f"distributed_type: FSDP\nnum_processes: 4\n{more}\n"
        f"fsdp_config:\n  fsdp_version: {version}{table}"
    )


def test_what_accelerate_writes(accelerate: Imports) -> None:
    found = accelerate(WRITTEN)
    plan = found.job.plan
    zero, precision = plan.layout.zero, plan.mathematics.precision
    assert (zero.stage, zero.reshard_after_forward, plan.mesh.dp_shard) == (3, True, 8)
    assert (zero.parameter_offload, zero.optimizer_offload) == ("host", "host")
    assert (zero.unit_blocks, zero.prefetch, zero.accumulate) == (1, 1, "slices")
    assert plan.layout.recompute.policy == "full"
    assert (precision.parameters, precision.gradients) == ("bf16", "fp32")
    assert (precision.reduction, precision.master) == ("bf16", "fp32")
    given = {row.key for row in found.rows if row.given != "(not set)"}
    lines = [line.strip().partition(":")[0] for line in WRITTEN.strip().splitlines()]
    names = {f"fsdp_config.{line}" if line.startswith("fsdp_") else line for line in lines}
    assert given == names - {"fsdp_config.fsdp_config"}


@pytest.mark.parametrize(
    ("strategy", "stage", "resharded", "mesh"),
    [
        ("FULL_SHARD", 3, True, (1, 4)),
        ("1", 3, True, (1, 4)),
        ("SHARD_GRAD_OP", 3, False, (1, 4)),
        ("NO_SHARD", 0, True, (4, 1)),
        ("HYBRID_SHARD", 3, True, (2, 2)),
        ("HYBRID_SHARD_ZERO2", 3, False, (2, 2)),
        ("5", 3, False, (2, 2)),
    ],
)
def test_a_strategy_of_fsdp_1_is_a_stage_and_a_mesh(
    accelerate: Imports, strategy: str, stage: int, resharded: bool, mesh: tuple[int, int]
) -> None:
    for key in ("sharding_strategy", "reshard_after_forward"):
        plan = accelerate(fsdp(1, "num_machines: 2", **{key: strategy})).job.plan
        assert (plan.layout.zero.stage, plan.layout.zero.reshard_after_forward) == (
            stage,
            resharded,
        )
        assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == mesh


@pytest.mark.parametrize(("value", "resharded"), [("true", True), ("false", False), (None, True)])
def test_fsdp_2_says_whether_units_are_gathered_again(
    accelerate: Imports, value: str | None, resharded: bool
) -> None:
    keys: dict[str, Any] = {} if value is None else {"reshard_after_forward": value}
    plan = accelerate(fsdp(2, **keys)).job.plan
    assert (plan.layout.zero.stage, plan.layout.zero.reshard_after_forward) == (3, resharded)


def test_values_of_the_other_version_are_refused(accelerate: Imports) -> None:
    key = "fsdp_config.fsdp_reshard_after_forward"
    refused = accelerate.refused(fsdp(2, reshard_after_forward="FULL_SHARD"))
    assert refused == [("wrong-type", key)]
    assert accelerate.refused(fsdp(1, reshard_after_forward="true")) == [("wrong-type", key)]
    key = "fsdp_config.fsdp_forward_prefetch"
    assert accelerate.refused(fsdp(2, forward_prefetch="true")) == [("import-not-honoured", key)]
    assert accelerate.refused(fsdp(3))[0] == (
        "import-not-honoured",
        "fsdp_config.fsdp_version",
    )


@pytest.mark.parametrize(
    ("word", "dtypes"),
    [
        ("no", ("fp32", "fp32", "fp32")),
        ("'no'", ("fp32", "fp32", "fp32")),
        ("bf16", ("bf16", "fp32", "bf16")),
        ("fp16", ("fp16", "fp32", "fp16")),
    ],
)
def test_mixed_precision(accelerate: Imports, word: str, dtypes: tuple[str, ...]) -> None:
    found = accelerate(fsdp(more=f"mixed_precision: {word}")).job.plan.mathematics.precision
    assert (found.parameters, found.gradients, found.reduction) == dtypes
    assert found.master == "fp32"
    assert found.loss_scaling == ("dynamic" if word == "fp16" else "none")
    if word == "fp16":
        assert (found.loss_scale_window, found.loss_scale_hysteresis) == (2000, 1)


def test_without_fsdp_replicas_are_whole(accelerate: Imports) -> None:
    plan = accelerate(
        "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16"
    ).job.plan
    assert (plan.layout.zero.stage, plan.mesh.dp_replicate) == (0, 4)
    assert plan.mathematics.precision.reduction == "fp32"


@pytest.mark.parametrize("kind", [*OTHER_TYPES, "FSDP3", "1"])
def test_another_way_of_training_is_refused(accelerate: Imports, kind: str) -> None:
    text = f"distributed_type: {kind}\nnum_processes: 2\ndeepspeed_config: {{zero_stage: 2}}"
    assert accelerate.refused(text) == [("import-kind", "distributed_type")]


@pytest.mark.parametrize(
    ("more", "rule", "place"),
    [
        ("num_procesess: 4", "import-unknown-key", "num_procesess"),
        ("mixed_precision: fp8", "import-not-honoured", "mixed_precision"),
        ("mixed_precision: bf61", "unknown-choice", "mixed_precision"),
        ("dynamo_config: {dynamo_backend: INDUCTOR}", "import-not-honoured", "dynamo_backend"),
        ("downcast_bf16: 'yes'", "import-not-honoured", "downcast_bf16"),
        ("compute_environment: AMAZON_SAGEMAKER", "import-not-honoured", "compute_environment"),
        ("fp8_config: {backend: TE}", "import-not-honoured", "fp8_config.backend"),
        ("num_machines: 0", "out-of-range", "num_machines"),
    ],
)
def test_bad_input_names_the_key(accelerate: Imports, more: str, rule: str, place: str) -> None:
    ((found, where),) = accelerate.refused(fsdp(more=more))
    assert (found, where.endswith(place)) == (rule, True)


def test_bad_keys_of_fsdp_are_named(accelerate: Imports) -> None:
    refused = accelerate.refused(fsdp(ignored_modules="head", offload_parms="true"))
    assert refused == [
        ("import-not-honoured", "fsdp_config.fsdp_ignored_modules"),
        ("import-unknown-key", "fsdp_config.fsdp_offload_parms"),
    ]
    (problem,) = accelerate.problems(fsdp(offload_parms="true"))
    assert problem.suggestions[0] == "fsdp_config.fsdp_offload_params"


def test_names_without_their_prefix_are_the_same(accelerate: Imports) -> None:
    text = fsdp().replace("fsdp_version: 1", "offload_params: true\n  min_num_params: null")
    found = accelerate(text)
    assert found.job.plan.layout.zero.parameter_offload == "host"
    assert rows_of(found, "fsdp_config.fsdp_min_num_params")[0].why == "null is no value"


def test_activations_in_host_memory(accelerate: Imports) -> None:
    keys: dict[str, Any] = {
        "activation_checkpointing": "true",
        "activation_checkpointing_offload": "true",
    }
    plan = accelerate(fsdp(2, **keys)).job.plan
    assert (plan.layout.recompute.policy, plan.layout.recompute.offload) == ("full", "host")


def test_a_key_without_need_is_said_so_with_the_reason(accelerate: Imports) -> None:
    rules = TABLES.keys["rest"]
    keys = [key for key, rule in rules.items() if rule == KeyRule(why=rule.why)]
    of_fsdp = [key for key in keys if key.startswith("fsdp_config.")]
    more = "\n".join(f"{key}: 1" for key in keys if key not in of_fsdp)
    values: dict[str, Any] = {key.removeprefix("fsdp_config.fsdp_"): "true" for key in of_fsdp}
    found = accelerate(fsdp(more=more, **values))
    for key in keys:
        (row,) = rows_of(found, key)
        assert (row.setting, row.why) == ("", rules[key].why)
