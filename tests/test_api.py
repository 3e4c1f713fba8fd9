"""The verbs as Python functions, in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import echelon as ec


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "before",
    [
        "pass",
        "import echelon.proof.verdict",
        "from echelon.proof.run import prove",
        "import echelon.proof as package; assert package.__name__ == 'echelon.proof'",
        "from echelon import prove; from echelon.proof.claims import claims",
    ],
)
def test_a_verb_is_callable_whatever_was_imported_first(before: str) -> None:
    code = (
        f"{before}\n"
        "import echelon as ec, echelon.proof.verdict, echelon.api.planning\n"
        "echelon.api.planning.prove = lambda plan: ('called', plan)\n"
        "assert ec.prove(1) == ('called', 1)\n"
        "assert echelon.proof.verdict.Proof.__module__ == 'echelon.proof.verdict'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_units_are_measured_and_balance_stages(tmp_path: Path) -> None:
    sets = ["model.layers=3", "model.hidden=32", "model.head_dim=8", "batch.sequence_length=16"]
    out = tmp_path / "times.json"
    times = ec.calibrate_model("nano", settings=sets, out=out, seconds=0.0)
    assert (times.device, times.model) == ("cpu", "nano-changed")
    plan = ec.plan("nano", settings=[*sets, "mesh.pp=3", f"pipeline.times={out}"])
    assert plan.num_stages == 3


def test_the_schedule_of_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ec.EchelonError, match="run-exists"):
        ec.observe_schedule(tmp_path)
