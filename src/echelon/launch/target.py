"""Name a function so that another process finds it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from echelon.core.errors import ConfigError
from echelon.core.rulebook.launch import TARGET_NOT_FOUND
from echelon.launch.messages import Target

TargetFunction = Callable[..., Any]


def name_target(target: str | TargetFunction) -> Target:
    """Return the name of `target`: ``"package.module:function"`` or a top-level function."""
    if isinstance(target, str):
        module, _, name = target.partition(":")
        if not (module and name):
            raise ConfigError(
                TARGET_NOT_FOUND.problem(f"{target!r} is not of the form package.module:function")
            )
        return Target(module=module, name=name)
    if "<" in target.__qualname__ or target.__module__ == "__main__":
        raise ConfigError(
            TARGET_NOT_FOUND.problem(
                f"{target.__module__}:{target.__qualname__} cannot be imported by another process"
            )
        )
    file = getattr(sys.modules.get(target.__module__), "__file__", None) or ""
    return Target(module=target.__module__, name=target.__qualname__, file=file)


def find_target(target: Target) -> TargetFunction:
    """Return the function that `target` names, importing its module."""
    found: Any = _import(target)
    for part in target.name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(
            TARGET_NOT_FOUND.problem(f"{target.module} has no function {target.name}")
        )
    return found


def _import(target: Target) -> ModuleType:
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (target.module == missing or target.module.startswith(missing + ".")):
            raise
        if not target.file:
            raise ConfigError(
                TARGET_NOT_FOUND.problem(f"there is no module {target.module}")
            ) from error
    spec = importlib.util.spec_from_file_location(target.module, target.file)
    if spec is None or spec.loader is None:
        raise ConfigError(TARGET_NOT_FOUND.problem(f"{target.file} is not a Python module"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[target.module] = module
    spec.loader.exec_module(module)
    return module
