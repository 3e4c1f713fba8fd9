"""What `import echelon as ec` gives: these names, each typed, and nothing loaded before its use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import echelon as ec
from echelon.core import errors

ROOT = Path(__file__).resolve().parent.parent
ERRORS = (
    *("CheckpointError", "ConfigError", "DataError", "EchelonError", "EnvironmentProblem"),
    *("InfeasiblePlan", "Interrupted", "ProofFailed", "RunFailed"),
)
RECORDS = (
    *(
        "DistributionStrategy",
        "Fused",
        "Generated",
        "Logical",
        "OnRank",
        "OneDevice",
        "Plan",
        "PlanAnswer",
    ),
    *("SizesAnswer", "TrainResult", "VerifyCase"),
)
VERBS = (
    *("bisect", "calibrate_machine", "calibrate_model", "calibrate_run", "compare"),
    *("compare_strategies", "explore", "export", "export_weights"),
    *("generate", "import_run", "merge_calibrations", "observe", "observe_experts"),
    *("observe_schedule", "parallelize", "plan", "prove", "prove_module", "rehearse", "report"),
    *("strategy",),
    *("threaded", "train", "verify"),
)

# A user's file: every public name, and the type that a checker must see.
USED = """
from pathlib import Path
from typing import Literal, assert_type

from torch import Tensor, nn
from torch.optim import SGD

import echelon as ec
from echelon.api.calibrating.machine import MachineCalibration
from echelon.api.calibrating.merge import MergedCalibration
from echelon.api.calibrating.run import RunCalibration
from echelon.interop.export import ExportedRun
from echelon.interop.importer import ImportedRun
from echelon.api.exporting import ExportedWeights
from echelon.config.files.measurements import TimesFile
from echelon.parallel.threads.module import ThreadedModule
from echelon.planner.answer.answer import EstimatedPlan
from echelon.planner.explain.compare import PlanComparison
from echelon.proof.bisect.verdict import Bisection
from echelon.proof.verdict import Proof
from echelon.proof.deviations import StrategyDeviation
from echelon.proof.verdict import SubjectProof
from echelon.rehearsal.run import Rehearsal
from echelon.telemetry.routing import ExpertHotspots
from echelon.telemetry.schedule_report import TimelineReport
from echelon.telemetry.summary import RunSummary
from echelon.training.module.optimizer import ModuleOptimizer

version: str = ec.__version__
plan = ec.plan("nano", settings=["mesh.tp=2"])
assert_type(plan, ec.Plan)
assert_type(plan.mesh.world_size, int)
answer = ec.plan("llama3-8b", "8xh100", trainer="megatron-core", batch=512, pins=["tp=2"])
assert_type(answer, ec.PlanAnswer)
assert_type(answer.plan, ec.Plan)
assert_type(answer.step_s.high, float)
assert_type(answer.alternatives, tuple[EstimatedPlan, ...])
assert_type(answer.plans[0].plan, ec.Plan)
assert_type(ec.plan("nano", search=True, batch={"global_sequences": 8}), ec.PlanAnswer)
assert_type(ec.plan("nano", batch=8), ec.Plan)
alone = ec.plan("llama3-8b", trainer="torchtitan")
assert_type(alone, ec.PlanAnswer | ec.SizesAnswer)
if isinstance(alone, ec.SizesAnswer):
    assert_type(alone["8xh100"], ec.PlanAnswer)
assert_type(ec.prove(answer), Proof)
assert_type(ec.prove(answer.alternatives[0]), Proof)
assert_type(ec.compare(answer, plan), PlanComparison)
assert_type(ec.compare_strategies("nano", ["tp"]), tuple[StrategyDeviation, ...])
assert_type(ec.export(answer, "megatron"), ExportedRun)
assert_type(ec.export_weights("runs/nano", "out", dtype="bf16", threads=2), ExportedWeights)
assert_type(ec.train(answer), ec.TrainResult)
assert_type(ec.bisect(answer), Bisection | None)
assert_type(ec.parallelize(nn.Linear(2, 2), answer), tuple[nn.Linear, ModuleOptimizer])
assert_type(ec.prove_module("own.py:make", plan), SubjectProof)
proof = ec.prove(plan)
assert_type(proof, Proof)
assert_type(proof.proven, bool)
assert_type(ec.bisect(plan), Bisection | None)
assert_type(ec.rehearse(answer), Rehearsal)
assert_type(ec.rehearse("nano", whole=True).holds, bool)
assert_type(ec.verify("verify_ddp.py"), SubjectProof)

def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    model = nn.Linear(case.mesh["dp"], 2, dtype=case.dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    return ec.OneDevice(model=model, loss=lambda step: model.weight.sum(), optimizer=optimizer)

names = {"qkv": ec.Fused(parts=(ec.Logical(name="q", axis="tp"),))}
rank = ec.OnRank(model=nn.Linear(2, 2), step=lambda number: number, names=names)
run = ec.train(plan, data="stdlib")
assert_type(run, ec.TrainResult)
assert_type(run.run, Path)
text = ec.generate(run, "def ", max_tokens=20, settings=["mesh.tp=2"])
assert_type(text, ec.Generated)
assert_type(text.text, str)
assert_type(ec.generate(run, ["a", "b"]).texts, tuple[str, ...])
assert_type(ec.observe(run.run), RunSummary)
assert_type(ec.observe(run.run).last_loss, float | None)
assert_type(ec.observe_schedule(run.run, step=3), TimelineReport)
assert_type(ec.observe_experts(run.run), ExpertHotspots)
assert_type(ec.compare(plan, "run.toml"), PlanComparison)
assert_type(ec.export(plan, "megatron"), ExportedRun)
assert_type(ec.import_run("ds.json", ranks=2), ImportedRun)
assert_type(ec.report(answer, "plan.html"), tuple[Path, ...])
assert_type(ec.report(proof, "figures/"), tuple[Path, ...])
assert_type(ec.explore("explorer.html", model="llama3-8b"), Path)
assert_type(ec.calibrate_machine(out="cluster.toml"), MachineCalibration)
assert_type(ec.merge_calibrations(["a.toml", "b.toml"], out="c.toml"), MergedCalibration)
assert_type(ec.calibrate_model("nano", out="times.json"), TimesFile)
assert_type(ec.calibrate_run(run.run, out="cluster.toml"), RunCalibration)
assert_type(ec.collectives.all_reduce(nn.Linear(2, 2).weight), Tensor)
assert_type(ec.parallelize(nn.Linear(2, 2), plan), tuple[nn.Linear, ModuleOptimizer])
on_threads = ec.threaded(nn.Linear(2, 2), replicas=2)
assert_type(on_threads, ThreadedModule[nn.Linear])
assert_type(on_threads.module, nn.Linear)
assert_type(on_threads.sent["gather"], int)
with ec.strategy("mirrored", ranks=2).scope() as scope:
    assert_type(scope.num_replicas_in_sync, int)
    scoped = scope.model("nano")
    assert_type(scope.parallelize(nn.Linear(2, 2)), tuple[nn.Linear, ModuleOptimizer])
assert_type(ec.strategy("zero3"), ec.DistributionStrategy)
assert_type(scoped.plan, ec.Plan)
assert_type(scoped.fit().losses, tuple[float, ...])
try:
    proof.require()
except ec.ProofFailed as failed:
    assert_type(failed.rules, tuple[str, ...])
except (ec.InfeasiblePlan, ec.ConfigError, ec.DataError, ec.CheckpointError) as error:
    code: int = error.exit_code
except (ec.EnvironmentProblem, ec.RunFailed, ec.Interrupted):
    raise
except ec.EchelonError as error:
    print(error.problems[0].suggestions)
"""

# Each line is a mistake that a checker must find.
MISUSED = """
import echelon as ec

ec.trian("nano")
ec.plan("nano", setings=["mesh.tp=2"])
ec.plan(3)
ec.plan("nano").mesh.world_sise
ec.plan("nano", pins=["tp=2"])
ec.plan("nano", "8xh100").mesh
ec.plan("llama3-8b").mesh
ec.plan("nano", "8xh100", objective="speed")
ec.prove("nano")
ec.verify(plan)
ec.train("nano").sumary
ec.generate("runs/nano")
ec.observe(step=3)
ec.export("nano", "gpipe")
ec.calibrate_model("nano")
ec.parallelize(None, ec.plan("nano"))
ec.threaded(3, replicas=2)
ec.report(3, "plan.html")
"""


def diagnostics(file: Path) -> list[tuple[int, str]]:
    """Return the errors of pyright in a file of somebody who uses the package: line, message."""
    config = file.with_name("pyrightconfig.json")
    extra = [str(ROOT / "src")]
    config.write_text(json.dumps({"include": [file.name], "extraPaths": extra}))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "-p", str(config)),
            *("--pythonpath", sys.executable, "--outputjson"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(one["range"]["start"]["line"], one["message"]) for one in found]


def test_the_exported_names_are_these() -> None:
    assert sorted(ec.__all__) == sorted([*ERRORS, *RECORDS, "__version__", *VERBS, "collectives"])
    assert dir(ec) == sorted(ec.__all__)
    assert all(getattr(ec, name) is not None for name in ec.__all__)


def test_the_functions_of_collectives_are_these() -> None:
    names = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter")
    assert tuple(ec.collectives.__all__) == names
    for name in names:
        assert "Backward is" in str(getattr(ec.collectives, name).__doc__)


def test_every_error_of_the_tree_is_exported() -> None:
    tree = {name for name, value in vars(errors).items() if is_error(value)}
    assert tree == set(ERRORS)
    drawn = str(errors.__doc__).split("\n\n")[1]
    assert drawn in str(ec.__doc__)
    assert all(name in drawn for name in tree)


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ec.EchelonError)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/echelon/py.typed").is_file()


@cache
def modules_after(code: str) -> frozenset[str]:
    """Return what is loaded after `code` in a process of its own."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


def test_importing_loads_next_to_nothing() -> None:
    loaded = modules_after("import echelon")
    assert {name for name in loaded if name.startswith("echelon")} == {"echelon"}
    assert not loaded & {"torch", "numpy"}


def test_every_name_is_found_without_torch() -> None:
    assert "torch" not in modules_after(
        "import echelon as ec; [getattr(ec, name) for name in ec.__all__]"
    )


def test_no_verb_is_a_module_too() -> None:
    for name in VERBS:
        assert not (ROOT / "src/echelon" / name).exists()
        assert not (ROOT / "src/echelon" / f"{name}.py").exists()
        assert not (ROOT / "src/echelon/api" / f"{name}.py").exists()


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ec.trian  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_type_checker_sees_every_name_typed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USED)
    assert [name for name in ec.__all__ if f"ec.{name}" not in USED] == []
    assert diagnostics(file) == []


@pytest.mark.slow
def test_a_type_checker_finds_every_wrong_use(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MISUSED)
    wrong = [number for number, line in enumerate(MISUSED.splitlines()) if line.startswith("ec.")]
    assert sorted({line for line, _ in diagnostics(file)}) == wrong
