"""Six presets, one for each use of parallelism that guides name: each is proven, and trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.mesh import Mesh
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from echelon.training.loop import RankTask
from tests.training.small_runs import notes, read_steps, small_data

APPLICATIONS: Mapping[str, Mesh] = {
    "toy-finetuning": Mesh(dp_shard=4),
    "toy-pretraining": Mesh(pp=2, dp_replicate=2, tp=2),
    "toy-serving": Mesh(tp=4),
    "toy-limited": Mesh(dp_shard=4),
    "toy-production": Mesh(dp_replicate=2),
    "toy-experts": Mesh(dp_shard=4, ep=2),
}
SHORT = (
    "batch.sequence_length=16",
    "train.steps=2",
    "optimizer.warmup_steps=1",
    'train.validate_every="never"',
    "checkpoint.every=2",
)


def test_every_application_is_here() -> None:
    assert {name for name in preset_names("runs") if name.startswith("toy-")} == {*APPLICATIONS}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_the_strategy_is_what_its_guide_says(name: str) -> None:
    plan = load_job(name).plan
    zero, precision = plan.layout.zero, plan.mathematics.precision
    assert plan.mesh == APPLICATIONS[name]
    said = {
        "toy-finetuning": zero.stage == 3 and plan.layout.recompute.policy == "full",
        "toy-pretraining": plan.num_microbatches == 4 * plan.num_stages,
        "toy-serving": plan.model.kv_heads == plan.mesh.tp,
        "toy-limited": (zero.stage, zero.optimizer_offload, precision.parameters)
        == (2, "host", "fp16"),
        "toy-production": plan.num_microbatches > 1 and zero.stage == 0,
        "toy-experts": plan.model.experts is not None and plan.mesh.dp > plan.mesh.ep,
    }
    assert said[name]


@pytest.mark.system("S59")
@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_its_ranks_compute_what_one_process_computes(rank_pool: RankPool, name: str) -> None:
    proof = prove(load_job(name).plan, run_ranks=rank_pool.run, own_precision=False)
    assert proof.proven, proof.diagnosis
    assert all(claim.compared > 0 for one in proof.passes for claim in one.claims)


@pytest.mark.system("S59")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_it_trains(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    job = load_job(name, SHORT)
    task = RankTask(
        job=job,
        run_dir=str(tmp_path),
        data=str(small_data(tmp_path)),
        observer=f"{notes.__module__}:{notes.__name__}",
    )
    world = job.plan.mesh.world_size
    rank_pool.run("echelon.training.loop:train_rank", to_json(task), world)
    steps = [read_steps(tmp_path, rank) for rank in range(world)]
    assert set(steps[0]) == {1, 2}
    assert all(one == steps[0] for one in steps)
    assert all(4.0 < loss < 7.0 and norm > 0 for loss, norm, *_ in steps[0].values())
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()
