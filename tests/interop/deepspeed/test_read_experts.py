"""Expert parallelism of a DeepSpeed configuration: degrees, overrides, and what is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.imports import Imports

MODEL = ["model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=96"]
BATCH = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


def config(**section: Any) -> dict[str, Any]:
    return {**BATCH, "expert_parallel": {"enabled": True, **section}}


@pytest.mark.parametrize(
    ("more", "degrees"),
    [
        ({}, (1, 4, 4)),
        ({"zero_optimization": {"stage": 1}}, (1, 4, 4)),
    ],
)
def test_ranks_share_out_the_experts(
    deepspeed: Imports, more: dict[str, Any], degrees: tuple[int, ...]
) -> None:
    found = deepspeed({**config(autoep_size=4), **more}, extends="nano", ranks=4, sets=MODEL)
    mesh = found.job.plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.ep) == degrees


def test_what_is_left_of_the_data_ranks_are_replicas(deepspeed: Imports) -> None:
    found = deepspeed(config(autoep_size=2), extends="nano", ranks=4, sets=MODEL)
    assert (found.job.plan.mesh.dp_replicate, found.job.plan.mesh.dp_shard) == (2, 2)


def test_what_overrides_the_router_is_mapped(deepspeed: Imports) -> None:
    section = {
        "preset_model": "mixtral",
        "top_k": 4,
        "score_func": "sigmoid",
        "score_apply": "post",
        "route_norm": False,
        "routed_scaling_factor": 2.5,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "use_grouped_mm": True,
        "expert_tensor_parallel_size": 1,
    }
    sets = [text for text in MODEL if "top_k" not in text]
    found = deepspeed(config(**section), extends="nano", ranks=2, sets=sets)
    experts = found.job.plan.model.experts
    assert experts is not None
    assert (experts.top_k, experts.router, experts.groups, experts.top_groups) == (
        4,
        "sigmoid",
        4,
        2,
    )
    assert (experts.renormalise, experts.gate_scale) == (False, 2.5)


def test_automatic_values_are_those_of_the_model(deepspeed: Imports) -> None:
    section = {"top_k": "auto", "score_func": "auto", "routed_scaling_factor": "auto"}
    found = deepspeed(config(**section), extends="nano", ranks=2, sets=MODEL)
    experts = found.job.plan.model.experts
    assert experts is not None
    assert (experts.top_k, experts.router, experts.gate_scale) == (2, "softmax", 1.0)


def test_a_section_that_is_switched_off_sets_nothing(deepspeed: Imports) -> None:
    off = {**BATCH, "expert_parallel": {"enabled": False, "autoep_size": 4}}
    assert deepspeed(off, extends="nano", ranks=2).job.plan.mesh.ep == 1
    assert deepspeed({**BATCH, "expert_parallel": False}, ranks=2).job.plan.mesh.ep == 1


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"score_apply": "pre"}, "expert_parallel.score_apply"),
        ({"load_balance_coeff": 0.1}, "expert_parallel.load_balance_coeff"),
        ({"expert_activation": "gelu"}, "expert_parallel.expert_activation"),
        ({"route_scale": 2.0}, "expert_parallel.route_scale"),
    ],
)
def test_what_means_something_else_is_refused(
    deepspeed: Imports, section: dict[str, Any], place: str
) -> None:
    refused = deepspeed.refused(config(**section), extends="nano", ranks=2, sets=MODEL)
    assert refused == [("import-not-honoured", place)]


def test_a_model_without_experts_and_a_bare_switch_are_refused(deepspeed: Imports) -> None:
    problems = deepspeed.problems(config(autoep_size=2), extends="nano", ranks=2)
    assert "no-effect" in {problem.rule for problem in problems}
    bare = deepspeed.refused({**BATCH, "expert_parallel": True}, extends="nano", ranks=2)
    assert bare == [("import-not-honoured", "expert_parallel")]
