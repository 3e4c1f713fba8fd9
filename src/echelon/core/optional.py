"""Import a package that only some commands need, or say what to install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.data import PACKAGE_INSTALLED


def optional_package(name: str, *, extra: str, purpose: str) -> ModuleType:
    """Return the module `name`; EnvironmentProblem names the extra to install for `purpose`."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise EnvironmentProblem(
            PACKAGE_INSTALLED.problem(
                f"{purpose} needs the package {package}, which cannot be imported: {error}",
                works=(f"pip install 'echelon[{extra}]'",),
            )
        ) from error
