"""The zero_optimization table of a DeepSpeed JSON: stages, buckets, units, offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.core.plan import Context
from tests.interop.imports import Imports, rows_of, set_by, zero


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_says_what_the_data_ranks_share_out(deepspeed: Imports, stage: int) -> None:
    plan = deepspeed(zero(stage), ranks=4).job.plan
    assert plan.layout.zero.stage == stage
    assert (plan.mesh.dp_shard, plan.mesh.dp_replicate) == ((4, 1) if stage else (1, 4))


@pytest.mark.parametrize(("old", "stage"), [(True, 1), (False, 0)])
def test_the_old_form_of_the_table_is_a_truth_value(
    deepspeed: Imports, old: bool, stage: int
) -> None:
    plan = deepspeed({"zero_optimization": old}, ranks=2).job.plan
    assert plan.layout.zero.stage == stage


def test_groups_of_mics_are_hybrid_sharding(deepspeed: Imports) -> None:
    found = deepspeed(zero(3, mics_shard_size=2), ranks=8)
    assert (found.job.plan.mesh.dp_shard, found.job.plan.mesh.dp_replicate) == (2, 4)
    key = "zero_optimization.mics_shard_size"
    assert deepspeed.refused(zero(3, mics_shard_size=3), ranks=8) == [("import-not-honoured", key)]
    assert deepspeed(zero(3, mics_shard_size=-1), ranks=8).job.plan.mesh.dp_shard == 8


HPZ = "zero_optimization.zero_hpz_partition_size"
BATCH = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("size", "ranks", "sets", "secondary"),
    [
        (8, 16, (), True),
        (8, 16, ("cluster.preset=16xh100",), True),
        (16, 16, (), False),  # What all ranks keep is what rests on them anyway.
        (1, 16, (), False),
        (0, 16, (), False),
        (8, 8, (), False),
    ],
)
def test_secondary_slices_are_those_of_all_ranks_of_a_node_that_share_out(
    deepspeed: Imports, size: int, ranks: int, sets: tuple[str, ...], secondary: bool
) -> None:
    config = {**zero(3, zero_hpz_partition_size=size), **BATCH}
    found = deepspeed(config, ranks=ranks, sets=sets)
    assert found.job.plan.layout.zero.secondary is secondary
    assert set_by(found, HPZ) == ({"zero.secondary": True} if secondary else {})


def test_other_groups_of_secondary_slices_are_refused_with_the_one_that_is_there(
    deepspeed: Imports,
) -> None:
    config: dict[str, Any] = {**zero(3, zero_hpz_partition_size=4), **BATCH}
    (problem,) = deepspeed.problems(config, ranks=16)
    assert (problem.rule, problem.suggestions[0]) == ("import-not-honoured", "8")
    (problem,) = deepspeed.problems({**config, **zero(3, zero_hpz_partition_size=2)}, ranks=4)
    assert "none are several on each of several nodes" in problem.message
    kept = zero(3, zero_hpz_partition_size=8, stage3_max_reuse_distance=10**9)
    found = deepspeed({**kept, **BATCH}, ranks=16)
    assert set_by(found, HPZ) == {}
    assert found.job.plan.layout.zero.reshard_after_forward is False
    assert set_by(deepspeed({**zero(2, zero_hpz_partition_size=8), **BATCH}, ranks=16), HPZ) == {}


def test_a_bucket_is_counted_in_elements_of_the_gradients(deepspeed: Imports) -> None:
    config = {**zero(2, reduce_bucket_size=5e6), "bf16": {"enabled": True}}
    assert deepspeed(config, ranks=2).job.plan.layout.zero.bucket_bytes == 10_000_000
    assert set_by(deepspeed(zero(3, reduce_bucket_size=5e6), ranks=2), "reduce_bucket_size") == {}
    assert deepspeed.refused(zero(2, reduce_bucket_size=0.5)) == [
        ("wrong-type", "zero_optimization.reduce_bucket_size")
    ]


def test_small_parameters_stay_whole_up_to_and_with_the_threshold(deepspeed: Imports) -> None:
    found = deepspeed(zero(3, stage3_param_persistence_threshold=128), ranks=2)
    assert found.job.plan.layout.zero.keep_whole_below == 129
    found = deepspeed(zero(3, stage3_param_persistence_threshold=0), ranks=2)
    assert found.job.plan.layout.zero.keep_whole_below == 0


NANO_BLOCK = 184_576


@pytest.mark.parametrize(
    ("keys", "units"),
    [
        ({"stage3_prefetch_bucket_size": 0}, 0),
        ({"stage3_prefetch_bucket_size": 1000}, 1),
        ({"stage3_prefetch_bucket_size": 2 * NANO_BLOCK}, 2),
        ({"stage3_prefetch_bucket_size": 5e8}, 4),
        ({"stage3_max_live_parameters": 0}, 0),
        ({"stage3_max_live_parameters": 2 * NANO_BLOCK}, 1),
        (
            {"stage3_prefetch_bucket_size": 5e8, "stage3_max_live_parameters": 3 * NANO_BLOCK},
            2,
        ),
    ],
)
def test_what_is_gathered_ahead_is_whole_blocks(
    deepspeed: Imports, keys: dict[str, float], units: int
) -> None:
    assert deepspeed(zero(3, **keys), ranks=2).job.plan.layout.zero.prefetch == units


@pytest.mark.parametrize(
    ("keys", "resharded"),
    [
        ({"stage3_max_reuse_distance": 0}, True),
        ({"stage3_max_reuse_distance": 1e9}, False),
        ({"stage3_max_reuse_distance": 8 * NANO_BLOCK}, False),
        ({"stage3_max_reuse_distance": 8 * NANO_BLOCK - 1}, True),
        ({"stage3_max_reuse_distance": 1e9, "stage3_max_live_parameters": NANO_BLOCK}, True),
    ],
)
def test_the_reuse_distance_says_whether_units_are_gathered_again(
    deepspeed: Imports, keys: dict[str, float], resharded: bool
) -> None:
    plan = deepspeed(zero(3, **keys), ranks=2).job.plan
    assert plan.layout.zero.reshard_after_forward is resharded


def test_keys_of_stage_3_set_nothing_below_it(deepspeed: Imports) -> None:
    keys = {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}
    found = deepspeed(zero(2, **keys), ranks=2)
    for key in keys:
        (row,) = rows_of(found, f"zero_optimization.{key}")
        assert (row.setting, "stage is 2" in row.why) == ("", True)


@pytest.mark.parametrize(
    ("config", "rule", "place"),
    [
        (zero(0, offload_optimizer={"device": "cpu"}), "offload-needs-stage", "device"),
        (zero(2, offload_param={"device": "cpu"}), "offload-needs-stage", "device"),
        (zero(3, offload_param={"device": "nvme"}), "nvme-needs-folder", "device"),
        (zero(3, offload_param={"device": "hpu"}), "unknown-choice", "device"),
        (
            zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "import-not-honoured",
            "ratio",
        ),
        (zero(4), "out-of-range", "stage"),
        (
            zero(3, offload_param={"device": "cpu", "buffer_cuont": 4}),
            "import-unknown-key",
            "cuont",
        ),
    ],
)
def test_bad_input_names_the_key_of_the_file(
    deepspeed: Imports, config: dict[str, Any], rule: str, place: str
) -> None:
    problems = deepspeed.problems(config, ranks=2)
    assert [problem.rule for problem in problems] == [rule]
    assert place in problems[0].set_by


def test_mesh_and_recompute(deepspeed: Imports) -> None:
    config = {
        **zero(1),
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2, "partition": "uniform", "activation_checkpoint_interval": 0},
        "activation_checkpointing": {"cpu_checkpointing": True, "profile": False},
    }
    plan = deepspeed(config, ranks=8).job.plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard) == (2, 2, 2)
    assert (plan.layout.recompute.policy, plan.layout.recompute.offload) == ("full", "host")
    cut = {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2}}
    assert [rule for rule, _ in deepspeed.refused(cut)] == ["import-not-honoured"] * 2


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 2)])
def test_ulysses_and_what_is_shared_out_over_it(deepspeed: Imports, ranks: int, data: int) -> None:
    config = {**zero(2, reduce_bucket_size=1000), "sequence_parallel_size": 2}
    layout = deepspeed(config, ranks=ranks).job.plan.layout
    assert (layout.mesh.cp, layout.mesh.dp_shard) == (2, data)
    assert layout.context == Context(kind="ulysses", ulysses_degree=2)
    assert (layout.zero.stage, layout.zero.bucket_bytes) == (2, 4000)
    (problem,) = deepspeed.problems({"sequence_parallel_size": 8}, ranks=8)
    assert (problem.rule, "mesh.cp = 4" in problem.suggestions) == ("ulysses-divides-heads", True)
