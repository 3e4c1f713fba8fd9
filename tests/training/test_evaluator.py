"""One process finds the losses that the ranks validate, of each checkpoint that it comes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.rules.finders import require_trainable
from echelon.core.errors import CheckpointError
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.folder import list_checkpoints
from echelon.training.evaluator import CheckpointEvaluator, plan_alone
from echelon.training.loop import RankTask
from tests.training import small_runs
from tests.training.small_runs import FP64, small_data, small_job

LAYOUTS = {
    "pp2 zero1": ("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=1"),
    "servers": ("mesh.dp_replicate=2", "servers.count=1"),
    "islands": ("mesh.dp_replicate=2", "local_sgd.every=4"),
}


class Notes(small_runs.Notes):
    """Be told of validations, too."""

    def validated(self, step: int, loss: float) -> None:
        pass


def notes(_job: object, run_dir: Path, rank: int) -> Notes:
    return Notes(run_dir, rank)


def trained(pool: RankPool, folder: Path, settings: tuple[str, ...]) -> tuple[RankTask, float]:
    """Train 8 steps with checkpoints every 4; return what ranks were told, and their last loss."""
    validated = ("train.validate_every=8", "checkpoint.every=4", "data.validation_fraction=0.2")
    job = small_job([*FP64, *validated, *settings])
    (folder / "run").mkdir()
    task = RankTask(
        job=job,
        run_dir=str(folder / "run"),
        data=str(small_data(folder)),
        observer=f"{__name__}:notes",
    )
    mesh = job.plan.mesh
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    target = "echelon.training.loop:train_rank"
    summary = pool.run(target, to_json(task), mesh.world_size, labels=labels)[0]
    return task, summary.last_validation


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "servers" else [pytest.mark.slow]) for name in LAYOUTS],
)
def test_its_loss_is_that_of_the_ranks(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    task, loss = trained(rank_pool, tmp_path, LAYOUTS[name])
    checkpoints = list_checkpoints(tmp_path / "run/checkpoints")
    assert [one.step for one in checkpoints] == [4, 8]
    evaluator = CheckpointEvaluator(task)
    found = [evaluator.evaluate(one) for one in checkpoints]
    assert found[1].loss == pytest.approx(loss, rel=1e-10)
    assert found[0].loss != pytest.approx(loss, rel=1e-6)
    # It passes over those that newer ones came after, and over those of the run before.
    assert list(evaluator.follow(lambda: True)) == [found[1]]
    assert list(evaluator.follow(lambda: True, after=8)) == []
    # The last one is saved between two looks, when the run says that it has ended.
    hidden = checkpoints[1].path.rename(tmp_path / "later")
    looks = iter((False, False, True, True))

    def ended() -> bool:
        over = next(looks)
        if over and hidden.exists():
            hidden.rename(checkpoints[1].path)
        return over

    assert list(evaluator.follow(ended)) == found
    # What was removed while it was read is passed over; what is damaged is not.
    gone = replace(checkpoints[1], path=tmp_path / "run/checkpoints/step-000009", step=9)
    with pytest.raises(CheckpointError):
        evaluator.evaluate(gone)
    next(checkpoints[1].path.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError):
        list(evaluator.follow(lambda: True))
    evaluator.close()


def test_a_plan_of_one_rank_rounds_matrices_as_the_run_does() -> None:
    rounds = ["mesh.dp_shard=2", "zero.stage=3", "zero.gather=int8", "zero.int8_block=4"]
    alone = plan_alone(small_job(rounds).plan)
    require_trainable(alone)
    assert alone.layout.zero.gather == "int8"


def test_a_plan_of_one_rank_has_the_losses_of_the_run() -> None:
    plan = small_job([*LAYOUTS["servers"], "servers.updates=asynchronous"]).plan
    alone = plan_alone(plan)
    assert alone.mesh.world_size == 1
    assert alone.layout.pipeline.stages == ((0, 1),)
    assert not alone.mathematics.updates.is_asynchronous
    assert alone.num_microbatches * alone.layout.microbatch_sequences == 4
