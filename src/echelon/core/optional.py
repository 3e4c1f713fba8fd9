"""Import a package that only some uses need, or say what to install.

Echelon is installed from its source: what works is a command in the checkout, `.[train]`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.data import PACKAGE_INSTALLED


def install_command(extra: str) -> str:
    """Return what installs the packages of an extra."""
    return f"pip install '.[{extra}]' in the checkout of Echelon"


def optional_package(name: str, *, extra: str, purpose: str) -> ModuleType:
    """Return the module `name`; EnvironmentProblem names the extra to install for `purpose`."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise EnvironmentProblem(
            PACKAGE_INSTALLED.problem(
                f"{purpose} needs the package {package}, which cannot be imported: {error}",
                suggestions=(install_command(extra),),
            )
        ) from error


def missing_package(name: str, *, extra: str, purpose: str, set_by: str = "") -> Problem | None:
    """Return the problem of a package that is not installed; it is looked for, not imported."""
    if find_spec(name) is not None:
        return None
    return PACKAGE_INSTALLED.problem(
        f"{purpose} needs the package {name}, which is not installed",
        set_by=set_by,
        suggestions=(install_command(extra),),
    )
