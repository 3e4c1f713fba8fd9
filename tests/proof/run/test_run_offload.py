"""Where slices rest between uses changes nothing, bit for bit, on any rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.core.plan import OffloadTarget, Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from echelon.training.subject import EngineSubject
from tests.proof.layouts import BF16, FP16, layout

NUM_STEPS = 3

PLANS: dict[str, Plan] = {
    "zero1-adamw": layout(dp=2, zero={"stage": 1}),
    "zero2-bf16-muon": layout(
        dp=2, zero={"stage": 2}, precision=BF16, optimizer={"kind": "muon"}, tied=True
    ),
    "zero3-fp16-sgd-tensor": layout(
        dp=2, tp=2, zero={"stage": 3}, precision=FP16, optimizer={"kind": "sgd"}
    ),
    "zero3-hybrid-muon-slices": layout(
        dp=4,
        zero={"stage": 3, "accumulate": "slices", "prefetch": 0},
        mesh={"dp_replicate": 2, "dp_shard": 2},
        optimizer={"kind": "muon"},
    ),
    "zero3-stages-bf16-kept": layout(
        dp=2,
        pp=2,
        zero={"stage": 3, "reshard_after_forward": False},
        precision=BF16,
        recompute="full",
    ),
}


def train(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Take three steps and write down every value of this rank, and what each step reported."""
    for number, text in enumerate(argument["plans"]):
        plan = Plan.from_json(text)
        subject = EngineSubject(plan, context)
        found: dict[str, torch.Tensor] = {}
        for step in range(NUM_STEPS):
            report = subject.step(global_batch(plan, step), step)
            numbers = [report.loss, report.grad_norm, report.loss_scale, float(report.skipped)]
            found[f"{step} numbers"] = torch.tensor(numbers, dtype=torch.float64)
            told = {"parameters": subject.parameters(), "masters": subject.masters()}
            for kind, shards in {**told, **subject.state()}.items():
                for name, held in shards.items():
                    for shard in held:
                        key = f"{step} {kind} {name} {shard.offset}"
                        found[key] = shard.tensor.detach().clone()
        subject.close()
        save_file(found, Path(argument["directory"]) / f"{number}-{context.rank}.safetensors")


def resting(plan: Plan, optimizer: OffloadTarget, parameters: OffloadTarget, folder: Path) -> Plan:
    """Return the plan with its slices resting elsewhere."""
    zero = replace(
        plan.layout.zero,
        optimizer_offload=optimizer,
        parameter_offload=parameters if plan.layout.zero.stage == 3 else "none",
        offload_dir=str(folder),
    )
    return replace(plan, layout=replace(plan.layout, zero=zero))


@pytest.mark.system("S25", "S26")
@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", PLANS)
def test_offload_changes_no_bit(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    plan = shrink(PLANS[name])
    homes: list[tuple[OffloadTarget, OffloadTarget]] = [
        ("none", "none"),
        ("host", "host"),
        ("nvme", "nvme"),
        ("nvme", "none"),
        ("none", "host"),
    ]
    plans = [resting(plan, *home, tmp_path) for home in homes]
    argument = {"plans": [one.to_json() for one in plans], "directory": str(tmp_path)}
    world = plan.mesh.world_size
    labels = [plan.mesh.label(rank) for rank in range(world)]
    rank_pool.run(f"{__name__}:train", argument, world, labels=labels)

    for rank in range(world):
        right, *others = (
            load_file(tmp_path / f"{number}-{rank}.safetensors") for number in range(len(homes))
        )
        kinds = {key.split()[1] for key in right}
        assert {"numbers", "parameters", "masters"} < kinds
        for home, other in zip(homes[1:], others, strict=True):
            assert other.keys() == right.keys()
            odd = [key for key in right if not torch.equal(right[key], other[key])]
            assert odd == [], f"optimizer and parameters in {home}"
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left == {".safetensors"}, "files of slices are gone when a run is over"
