# SPDX-License-Identifier: Apache-2.0
"""Echelon: a model and a cluster become a parallel training run that you can trust.

    import echelon as ec

    plan = ec.plan("nano", settings=["mesh.tp=2", "mesh.pp=2"])
    ec.prove(plan).require()
    ec.train(plan, data="stdlib")

What goes wrong is one of these; `problems` are all that were found, each with the id of its rule:

    EchelonError                 one or more problems, each with a rule id
    |-- ConfigError              the run file, a flag or a preset is wrong            exit 2
    |   `-- InfeasiblePlan       each value is legal, together they cannot run        exit 2
    |-- DataError                a data file is missing, damaged or does not fit      exit 2
    |-- CheckpointError          a checkpoint is missing, damaged or does not fit     exit 2
    |-- EnvironmentProblem       the machine lacks something                          exit 3
    |-- ProofFailed              the plan was run and is not equal to one device      exit 1
    `-- RunFailed                training started and could not go on                 exit 4
        `-- Interrupted          ranks were asked to stop, and nothing is kept        exit 130

Everything is loaded when it is first used: importing Echelon takes milliseconds and no torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing would be most of what importing Echelon costs

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributionStrategy",
    "EchelonError",
    "EnvironmentProblem",
    "Fused",
    "Generated",
    "InfeasiblePlan",
    "Interrupted",
    "Logical",
    "OnRank",
    "OneDevice",
    "Plan",
    "PlanAnswer",
    "ProofFailed",
    "RunFailed",
    "SizesAnswer",
    "TrainResult",
    "VerifyCase",
    "__version__",
    "bisect",
    "calibrate_machine",
    "calibrate_model",
    "calibrate_run",
    "collectives",
    "compare",
    "compare_strategies",
    "explore",
    "export",
    "export_weights",
    "generate",
    "import_run",
    "merge_calibrations",
    "observe",
    "observe_experts",
    "observe_schedule",
    "parallelize",
    "plan",
    "prove",
    "prove_module",
    "rehearse",
    "report",
    "strategy",
    "threaded",
    "train",
    "verify",
]

if TYPE_CHECKING:
    from echelon.api import collectives
    from echelon.api.calibrating.machine import calibrate_machine
    from echelon.api.calibrating.merge import merge_calibrations
    from echelon.api.calibrating.run import calibrate_model, calibrate_run
    from echelon.api.comparing import compare, compare_strategies
    from echelon.api.converting import export, import_run
    from echelon.api.exporting import export_weights
    from echelon.api.generating import Generated, generate
    from echelon.api.observing import observe, observe_experts, observe_schedule
    from echelon.api.parallelizing import parallelize, threaded
    from echelon.api.planning import bisect, plan, prove
    from echelon.api.reporting import explore, report
    from echelon.api.strategies import DistributionStrategy, strategy
    from echelon.api.training import TrainResult, train
    from echelon.api.verifying import prove_module, rehearse, verify
    from echelon.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EchelonError,
        EnvironmentProblem,
        InfeasiblePlan,
        Interrupted,
        ProofFailed,
        RunFailed,
    )
    from echelon.core.plan import Plan
    from echelon.core.version import __version__
    from echelon.planner.answer.answer import PlanAnswer, SizesAnswer
    from echelon.proof.verify.case import Fused, Logical, OneDevice, OnRank, VerifyCase
else:
    # A type checker reads the imports above; with this function it would take any name for right.

    _ERRORS = "echelon.core.errors"
    _CASE = "echelon.proof.verify.case"
    _HOMES = {
        "CheckpointError": _ERRORS,
        "ConfigError": _ERRORS,
        "DataError": _ERRORS,
        "DistributionStrategy": "echelon.api.strategies",
        "EchelonError": _ERRORS,
        "EnvironmentProblem": _ERRORS,
        "Fused": _CASE,
        "Generated": "echelon.api.generating",
        "InfeasiblePlan": _ERRORS,
        "Interrupted": _ERRORS,
        "Logical": _CASE,
        "OnRank": _CASE,
        "OneDevice": _CASE,
        "Plan": "echelon.core.plan",
        "PlanAnswer": "echelon.planner.answer.answer",
        "ProofFailed": _ERRORS,
        "RunFailed": _ERRORS,
        "SizesAnswer": "echelon.planner.answer.answer",
        "TrainResult": "echelon.api.training",
        "VerifyCase": _CASE,
        "__version__": "echelon.core.version",
        "calibrate_machine": "echelon.api.calibrating.machine",
        "calibrate_model": "echelon.api.calibrating.run",
        "calibrate_run": "echelon.api.calibrating.run",
        "compare": "echelon.api.comparing",
        "compare_strategies": "echelon.api.comparing",
        "export": "echelon.api.converting",
        "export_weights": "echelon.api.exporting",
        "explore": "echelon.api.reporting",
        "generate": "echelon.api.generating",
        "import_run": "echelon.api.converting",
        "merge_calibrations": "echelon.api.calibrating.merge",
        "observe": "echelon.api.observing",
        "observe_experts": "echelon.api.observing",
        "observe_schedule": "echelon.api.observing",
        "parallelize": "echelon.api.parallelizing",
        "plan": "echelon.api.planning",
        "prove": "echelon.api.planning",
        "prove_module": "echelon.api.verifying",
        "bisect": "echelon.api.planning",
        "rehearse": "echelon.api.verifying",
        "report": "echelon.api.reporting",
        "strategy": "echelon.api.strategies",
        "threaded": "echelon.api.parallelizing",
        "train": "echelon.api.training",
        "verify": "echelon.api.verifying",
    }

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_module("echelon.core.notebook").NOTEBOOK_VIEWS.load_from(_load_views)
        if name == "collectives":
            return import_module("echelon.api.collectives")
        return getattr(import_module(_HOMES[name]), name)

    def _load_views() -> None:
        """Register what notebooks show of records."""
        import_module("echelon.page.notebook")

    def __dir__() -> list[str]:
        return list(__all__)
