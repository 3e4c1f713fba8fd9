"""The run that the prover asks for is the real one: it validates, saves, resumes and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.config.load import load_job
from echelon.core.mesh import Mesh
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink

TARGET = "echelon.training.whole_run"
SPARSE = [
    *("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=32"),
    *("model.experts.router_bias=true", "experts.balance=both"),
]


def small_plan(*settings: str) -> Plan:
    plan = shrink(load_job("nano", settings).plan, precision="fp64")
    model = replace(plan.model, vocab=257)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def whole_run(pool: RankPool, folder: Path, first: Plan, second: Plan) -> dict[str, Any]:
    argument: dict[str, Any] = {
        "folder": str(folder),
        "texts": ["hello world " * 9, "another text, " * 7, "x" * 50],
        "plans": [first.to_json(), second.to_json()],
        "num_steps": 4,
        "saved_after": 2,
        "validation_fraction": 0.2,
        "validation_batches": 4,
        "prompts": [list(b"he"), list(b"a")],
        "count": 5,
    }
    pool.run(f"{TARGET}:write_data", argument, 1, labels=[""])
    labels = [first.mesh.label(rank) for rank in range(first.mesh.world_size)]
    pool.run(f"{TARGET}:train", argument, len(labels), labels=labels)
    pool.run(f"{TARGET}:read_back", argument, 1, labels=[""])
    names = ("run-0-rank-0000", "run-0-rank-0001", "run-1-rank-0000", "written")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.quick("settings0")
@pytest.mark.system("S52")
@pytest.mark.parametrize("settings", [[], SPARSE])
def test_a_run_is_saved_resumed_under_another_layout_and_read_back(
    rank_pool: RankPool, tmp_path: Path, settings: list[str]
) -> None:
    first = small_plan("mesh.tp=2", *settings)
    blocks = tuple(range(first.model.layers))
    pipeline = replace(first.layout.pipeline, stages=(blocks[:1], blocks[1:]))
    second = replace(first, layout=replace(first.layout, mesh=Mesh(pp=2), pipeline=pipeline))
    told = whole_run(rank_pool, tmp_path, first, second)
    kinds = [one["kind"] for one in told["run-0-rank-0000"]]
    half = ["step", "step", "saved"]
    last = ["step", "step", "validation", "saved"]
    assert kinds == ["validation", *half, *last]
    assert [one["kind"] for one in told["run-1-rank-0000"]] == ["validation", *last]

    def losses(name: str) -> list[float]:
        return [one["loss"] for one in told[name] if "loss" in one]

    assert losses("run-0-rank-0000") == losses("run-0-rank-0001")
    # The second run validates where it starts, which the first one did not.
    resumed = losses("run-1-rank-0000")[1:]
    assert resumed == pytest.approx(losses("run-0-rank-0000")[3:], rel=1e-12)
    assert told["written"]["over a cache"] == told["written"]["without a cache"]
    assert [len(text) for text in told["written"]["over a cache"]] == [5, 5]
    read = load_file(tmp_path / "read-back.safetensors")
    shapes = {name: tuple(value.shape) for name, value in read.items()}
    assert shapes == {spec.name: spec.shape for spec in parameters(first.model)}
    assert {value.dtype for value in read.values()} == {torch.float64}
