"""Loading: layers, sources, presets, --set, and the job that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job, run_name_of
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.mesh import Mesh
from tests.config.problems import SMALL, problems_of, write

ROOT = Path(__file__).resolve().parents[3]


def test_the_demo_is_eight_ranks_in_three_dimensions() -> None:
    job = load_job(ROOT / "examples" / "nano.toml")
    plan = job.plan
    assert plan.mesh == Mesh(pp=2, dp_replicate=2, tp=2)
    assert plan.layout.sequence_parallel
    assert plan.layout.pipeline.schedule == "1f1b"
    assert plan.layout.pipeline.stages == ((0, 1), (2, 3))
    assert plan.num_microbatches >= 4
    assert plan.cluster.num_devices == plan.mesh.world_size
    assert plan.cluster.backend == "gloo"
    assert plan.name == job.train.run_name == "nano"
    assert plan.mathematics.optimizer.total_steps == job.train.steps
    assert job.data.source == "stdlib"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_example_takes_every_stage_of_zero_as_it_says(stage: int) -> None:
    sets = ["mesh.dp_replicate=1", "mesh.dp_shard=2", f"zero.stage={stage}"]
    for more in ([], ["zero.optimizer_offload=host"], ["precision.parameters=bf16"]):
        plan = load_job(ROOT / "examples" / "nano.toml", [*sets, *more]).plan
        assert plan.mesh == Mesh(pp=2, dp_shard=2, tp=2)
        assert plan.layout.zero.stage == stage


def test_paths_are_taken_from_the_file_that_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path / "inner", 'extends = "nano"\n[data]\nsource = "text"\n')
    assert load_job(run).data.source == str(tmp_path / "inner" / "text")
    assert load_job(run, ["data.source=other"]).data.source == str(tmp_path / "other")
    assert load_job(run, ["data.source=stdlib"]).data.source == "stdlib"


def test_whole_numbers_stand_for_numbers_and_become_floats() -> None:
    optimizer = load_job("nano", ["optimizer.weight_decay=0"]).plan.mathematics.optimizer
    assert isinstance(optimizer.weight_decay, float)


def test_a_run_is_named_after_its_file() -> None:
    assert run_name_of("runs/My run (2).toml") == "My-run-2-"
    assert run_name_of("llama3.1-405b") == "llama3.1-405b"
    assert run_name_of(Path("...toml")) == "run"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        SMALL
        + """
        [mesh]
        tp = "2"
        pp = 0
        dp_replicate = 5
        dp_shrad = 2
        [optimizer]
        schedule = "cosin"
        [recompute]
        every = 2
        [mash]
        x = 1
        """.replace("\n        ", "\n"),
    )
    found = problems_of(run, ["zero.stage=3", "model.kv_heads=7"])
    assert set(found) == {
        "kv-heads-divide-heads",
        "wrong-type",
        "degree-at-least-one",
        "unknown-key",
        "unknown-choice",
        "no-effect",
        "batch-divides",
        "zero-shares-out",
    }


def test_the_kind_of_error_says_whether_single_values_are_wrong(tmp_path: Path) -> None:
    run = write(tmp_path, SMALL)
    with pytest.raises(InfeasiblePlan):
        load_job(run, ["mesh.tp=4"])
    with pytest.raises(ConfigError) as caught:
        load_job(run, ["mesh.tp=4", "mesh.pp=0"])
    assert not isinstance(caught.value, InfeasiblePlan)
    assert "tp-divides-kv-heads" in caught.value.rules
