"""The verbs as Python functions, in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import echelon as ec
from echelon.config.load import load_job


def test_a_plan_is_that_of_the_run_with_settings_on_top() -> None:
    plan = ec.plan("nano", settings=["mesh.tp=2"])
    assert plan == load_job("nano", ["mesh.tp=2"]).plan
    assert isinstance(plan, ec.Plan)
    assert ec.plan("nano", cluster="8xh100").cluster.backend == "nccl"


def test_every_mistake_is_in_the_error() -> None:
    with pytest.raises(ec.EchelonError) as caught:
        ec.plan("nano", settings=["mesh.tp=3", "mesh.pp=9"])
    assert {"tp-divides-heads", "layers-fill-stages"} <= set(caught.value.rules)


def test_a_configuration_of_another_tool_is_a_run(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    run = ec.import_run(config, ranks=2, settings=["train.steps=50"])
    assert run.plan.layout.zero.stage == 1
    assert {row.key: row.setting for row in run.rows}["gradient_clipping"] == "optimizer.clip_norm"
    run.write(tmp_path / "run.toml")
    loaded = ec.plan(tmp_path / "run.toml")
    assert loaded.same_mathematics(run.plan)
    config.write_text('{"zero_optimisation": {"stage": 1}}')
    with pytest.raises(ec.EchelonError, match="import-unknown-key"):
        ec.import_run(config)


def test_a_plan_is_proven() -> None:
    proof = ec.prove(ec.plan("nano", settings=["mesh.dp_replicate=2"]))
    assert proof.proven
    assert proof.mesh == "dp2"


@pytest.mark.parametrize(
    "before",
    [
        "pass",
        "import echelon.prove.proof",
        "from echelon.prove.run import prove",
        "import echelon.prove as package; assert package.__name__ == 'echelon.prove'",
        "from echelon import prove; from echelon.prove import proof",
    ],
)
def test_a_verb_is_callable_whatever_was_imported_first(before: str) -> None:
    code = (
        f"{before}\n"
        "import echelon as ec, echelon.prove.proof, echelon.api\n"
        "echelon.api.prove = lambda plan: ('called', plan)\n"
        "assert ec.prove(1) == ('called', 1)\n"
        "assert echelon.prove.proof.Proof.__module__ == 'echelon.prove.proof'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ec.trian  # type: ignore[attr-defined]


def test_units_are_measured_and_balance_stages(tmp_path: Path) -> None:
    sets = ["model.layers=3", "model.hidden=32", "model.head_dim=8", "batch.sequence_length=16"]
    out = tmp_path / "times.json"
    times = ec.calibrate("nano", settings=sets, out=out, seconds=0.0)
    assert (times.device, times.model) == ("cpu", "nano-changed")
    plan = ec.plan("nano", settings=[*sets, "mesh.pp=3", f"pipeline.times={out}"])
    assert plan.num_stages == 3


def test_the_schedule_of_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ec.EchelonError, match="run-exists"):
        ec.observe_schedule(tmp_path)


@pytest.mark.parametrize(
    "name", ["calibrate", "calibrate_machine", "compare", "export", "observe_schedule", "plan"]
)
def test_a_verb_is_found_without_torch(name: str) -> None:
    code = f"import sys, echelon as ec; ec.{name}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_exported_name_is_there() -> None:
    assert all(getattr(ec, name) is not None for name in ec.__all__)
    assert dir(ec) == sorted(ec.__all__)
