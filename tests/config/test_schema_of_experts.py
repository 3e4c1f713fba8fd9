"""Settings of experts: what they mean for ZeRO, what is derived, and what the plan then says."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.experts import Balance, ExpertLayout
from tests.config.problems import SMALL, SPARSE, problems_of, write
from tests.config.suggestions import taken


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return write(tmp_path, SPARSE)


def test_slices_at_rest_elsewhere_are_those_of_experts_too(sparse: Path) -> None:
    sets = ["mesh.dp_shard=2", "zero.stage=1", "zero.optimizer_offload=host"]
    assert problems_of(sparse, sets) == {}
    sets.append("experts.zero_stage=0")
    found = problems_of(sparse, sets)
    assert list(found) == ["offload-needs-stage"]
    assert "of experts whole" in found["offload-needs-stage"].message
    for advice in found["offload-needs-stage"].suggestions:
        assert problems_of(sparse, taken(advice, sets)) == {}


def test_units_are_gathered_where_experts_alone_are_cut(sparse: Path) -> None:
    sets = ["mesh.dp_shard=2", "experts.zero_stage=3"]
    job = load_job(sparse, [*sets, "zero.prefetch=2", "zero.bucket_bytes=100000"])
    assert job.plan.layout.zero.stage == 0
    assert job.plan.layout.experts.zero_stage == 3
    assert job.source_of("zero.reshard_after_forward").startswith("derived: there is no pipeline")
    assert problems_of(sparse, [*sets, "zero.keep_whole_below=1152"]) == {}
    found = problems_of(sparse, [*sets, "zero.keep_whole_below=1153"])
    assert "the largest parameter of run has 1152 elements" in found["no-effect"].message


def test_buckets_have_a_size_where_experts_are_not_gathered(sparse: Path) -> None:
    whole = ["mesh.dp_shard=2", "zero.stage=3", "zero.bucket_bytes=100000"]
    assert list(problems_of(sparse, whole)) == ["no-effect"]
    assert problems_of(sparse, [*whole, "experts.zero_stage=1"]) == {}
    assert problems_of(sparse, ["mesh.tp=2", "zero.bucket_bytes=100000"]) == {}
    assert list(problems_of(sparse, ["zero.bucket_bytes=100000"])) == ["no-effect"]


def test_whole_experts_of_odd_width_are_no_obstacle_to_slices(sparse: Path) -> None:
    sets = ["mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "zero.keep_whole_below=10"]
    assert problems_of(sparse, [*sets, "model.experts.ffn=25"]) == {}
    pieces = [*sets, "model.experts.ffn=25", "experts.expert_tp=2"]
    assert list(problems_of(sparse, pieces)) == ["expert-tp-divides-ffn"]


def test_settings_of_experts_become_two_records_of_the_plan(sparse: Path) -> None:
    sets = [
        "experts.balance=both",
        "experts.aux_coefficient=1",
        "experts.aux_over=microbatch",
        "experts.z_coefficient=0.001",
        "experts.bias_rate=0.01",
        "experts.capacity_factor=2",
        "experts.drop=score",
        "experts.route=even",
        "mesh.dp_shard=4",
        "mesh.ep=2",
        "experts.chunks=3",
        "experts.padded=true",
        "zero.stage=2",
        "model.experts.groups=4",
        "model.experts.top_groups=2",
        "model.experts.gate_scale=2.5",
        "model.experts.renormalise=false",
    ]
    plan = load_job(sparse, sets).plan
    assert plan.mathematics.balance == Balance(
        kind="both",
        aux_coefficient=1.0,
        aux_over="microbatch",
        z_coefficient=0.001,
        bias_rate=0.01,
        capacity_factor=2.0,
        drop="score",
        route="even",
    )
    assert plan.layout.experts == ExpertLayout(zero_stage=2, chunks=3, padded=True)
    experts = plan.model.experts
    assert experts is not None
    assert (experts.groups, experts.top_groups, experts.gate_scale) == (4, 2, 2.5)
    assert not experts.renormalise
    assert experts.router_bias


def test_what_is_derived_says_so(sparse: Path) -> None:
    job = load_job(sparse, ["experts.balance=bias", "mesh.dp_shard=2", "zero.stage=1"])
    assert job.source_of("model.experts.router_bias") == "derived: experts.balance"
    assert job.source_of("experts.zero_stage") == "derived: zero.stage"
    assert job.plan.layout.experts.zero_stage == 1
    plain = load_job(sparse).plan
    assert plain.mathematics.balance == Balance()
    assert plain.layout.experts == ExpertLayout()
    assert plain.model.experts is not None
    assert not plain.model.experts.router_bias


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["mesh.dp_shard=4", "mesh.ep=4", "zero.stage=1", "experts.balance=bias"],
        ["mesh.dp_shard=4", "mesh.ep=2", "zero.stage=3", "experts.zero_stage=1"],
        ["mesh.dp_shard=2", "experts.zero_stage=3", "experts.capacity_factor=1.5"],
        ["mesh.tp=2", "experts.expert_tp=2", "experts.balance=both", "experts.z_coefficient=1"],
    ],
)
def test_the_resolved_run_file_is_the_same_run(
    tmp_path: Path, sparse: Path, sets: list[str]
) -> None:
    job = load_job(sparse, sets)
    again = load_job(write(tmp_path, resolved_toml(job), "again.toml"))
    assert (again.plan, resolved_toml(again)) == (job.plan, resolved_toml(job))


def test_a_dense_plan_has_the_defaults(tmp_path: Path) -> None:
    sets = ["mesh.dp_shard=2", "zero.stage=3"]
    plan = load_job(write(tmp_path, SMALL), sets).plan
    assert plan.layout.experts == ExpertLayout()
    assert plan.mathematics.balance == Balance()
