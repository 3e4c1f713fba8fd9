"""Echelon: a model and a cluster become a parallel training run that you can trust.

    import echelon as ec

    plan = ec.plan("nano", settings=["mesh.tp=2", "mesh.pp=2"])
    ec.prove(plan).require()
    ec.train(plan, data="stdlib")

Everything is loaded when it is first used: importing Echelon takes milliseconds and no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # typing would be most of what importing Echelon costs

if TYPE_CHECKING:
    from typing import Any

    from echelon.api import (
        calibrate,
        import_run,
        observe_schedule,
        parallelize,
        plan,
        prove,
        train,
    )
    from echelon.core.errors import EchelonError
    from echelon.core.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "EchelonError",
    "Plan",
    "__version__",
    "calibrate",
    "calibrate_machine",
    "calibrate_run",
    "compare",
    "export",
    "import_run",
    "observe_schedule",
    "parallelize",
    "plan",
    "prove",
    "train",
]

_HOMES = {
    "EchelonError": "echelon.core.errors",
    "Plan": "echelon.core.plan",
    "calibrate": "echelon.api",
    "calibrate_machine": "echelon.api",
    "calibrate_run": "echelon.api",
    "compare": "echelon.api",
    "export": "echelon.api",
    "import_run": "echelon.api",
    "observe_schedule": "echelon.api",
    "parallelize": "echelon.api",
    "plan": "echelon.api",
}
_VERBS = ("prove", "train")


class _Verb(ModuleType):
    """A package named by a verb: calling it calls the function of that name in `echelon.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the verb says."""
        return getattr(import_module("echelon.api"), self.__name__.rpartition(".")[2])(
            *args, **kwargs
        )


class _Package(ModuleType):
    """Echelon itself: whatever imports `echelon.prove` sets it here, and it becomes callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return import_module(f"echelon.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
