"""The page of the Python API: every name of `echelon.__all__`, by what it is for.

A table of a group says in a sentence each what its names are; below it a `:::` line for each name
is its signature and docstring, once the site is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, isroutine
from types import ModuleType

import echelon

HEAD = """# Python API

Written by `python -m tests.docs.doc_pages` from `echelon.__all__`. `import echelon as ec` gives the
verbs as functions. Each raises the errors below, and returns a value instead of printing it.
Everything is loaded when it is first used: importing Echelon takes milliseconds and does not import
torch.
"""

GROUPS = {
    "Plan": ("plan", "compare", "explore", "Plan", "PlanAnswer", "SizesAnswer"),
    "Rehearse and prove": ("rehearse", "prove", "bisect", "prove_module", "verify"),
    "Train, and write text": ("train", "generate", "TrainResult", "Generated"),
    "Your own module and loop": (
        *("parallelize", "threaded", "strategy", "compare_strategies", "collectives"),
        "DistributionStrategy",
    ),
    "Look at runs": ("observe", "observe_schedule", "observe_experts", "report"),
    "Other tools": ("import_run", "export", "export_weights"),
    "Calibrate": ("calibrate_machine", "calibrate_model", "calibrate_run", "merge_calibrations"),
    "Programs for `verify`": ("VerifyCase", "OneDevice", "OnRank", "Logical", "Fused"),
    "Errors": (
        *("EchelonError", "ConfigError", "InfeasiblePlan", "DataError", "CheckpointError"),
        *("EnvironmentProblem", "ProofFailed", "RunFailed", "Interrupted"),
    ),
    "Version": ("__version__",),
}
"""Each title -> its names, in the order of the page."""

RECORDS = {
    "Records of a plan": (
        *("echelon.core.plan.Mathematics", "echelon.core.plan.Layout"),
        *("echelon.core.mesh.Mesh", "echelon.core.axis.Axis"),
        *("echelon.core.model_shape.ModelShape", "echelon.core.cluster.Cluster"),
        "echelon.core.event.Event",
    ),
    "Records that the functions return": (
        *(
            "echelon.planner.answer.answer.EstimatedPlan",
            "echelon.planner.predict.bands.BandedValue",
        ),
        *("echelon.planner.explain.compare.PlanComparison", "echelon.rehearsal.run.Rehearsal"),
        *("echelon.proof.verdict.Proof", "echelon.proof.verdict.SubjectProof"),
        *("echelon.proof.bisect.verdict.Bisection", "echelon.proof.deviations.StrategyDeviation"),
        *("echelon.parallel.threads.module.ThreadedModule", "echelon.api.strategies.StrategyScope"),
        "echelon.training.module.optimizer.ModuleOptimizer",
        *(
            "echelon.telemetry.summary.RunSummary",
            "echelon.telemetry.schedule_report.TimelineReport",
        ),
        "echelon.telemetry.routing.ExpertHotspots",
        *("echelon.interop.importer.ImportedRun", "echelon.interop.export.ExportedRun"),
        "echelon.api.exporting.ExportedWeights",
        "echelon.api.calibrating.machine.MachineCalibration",
        *(
            "echelon.config.files.measurements.TimesFile",
            "echelon.api.calibrating.run.RunCalibration",
        ),
        "echelon.api.calibrating.merge.MergedCalibration",
    ),
}
"""Each title -> records that have no name in `echelon` itself, by their paths."""


def api_page() -> str:
    """Return the page; ValueError where a public name has no group, or two."""
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(echelon.__all__):
        raise ValueError(f"groups and echelon.__all__ differ: {set(grouped) ^ {*echelon.__all__}}")
    return "\n".join((HEAD, *_public_groups(), *_record_groups()))


def resolve(path: str) -> object:
    """Return what a dotted path names: a module, or something in one; AttributeError if nothing."""
    module, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError:
        if not module:
            raise AttributeError(f"no module {path}") from None
        return getattr(resolve(module), name)


def home(name: str) -> str:
    """Return the path of a public name where it is written."""
    value = getattr(echelon, name)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type) or isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"echelon.core.version.{name}"


def _public_groups() -> Iterator[str]:
    for title, names in GROUPS.items():
        values = {f"ec.{name}": getattr(echelon, name) for name in names}
        yield _group(title, values, [home(name) for name in names])


def _record_groups() -> Iterator[str]:
    for title, paths in RECORDS.items():
        yield _group(title, {path.rpartition(".")[2]: resolve(path) for path in paths}, paths)


def _group(title: str, values: dict[str, object], paths: list[str] | tuple[str, ...]) -> str:
    rows = "\n".join(f"| `{name}` | {_sentence(value)} |" for name, value in values.items())
    directives = "\n".join(f"::: {path}\n" for path in paths)
    return f"## {title}\n\n| name | what it is |\n|---|---|\n{rows}\n\n{directives}"


def _sentence(value: object) -> str:
    """Return the first paragraph of a docstring, or a text itself."""
    if isinstance(value, str):
        return f'the version of Echelon, `"{value}"`'
    paragraph = (getdoc(value) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")
