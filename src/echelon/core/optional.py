# SPDX-License-Identifier: Apache-2.0
"""Import a package that only some uses need, or say what to install."""

from __future__ import annotations

import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.data import PACKAGE_INSTALLED
from echelon.core.version import DISTRIBUTION


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, from any folder."""
    checkout = checkout_folder()
    if checkout is None:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"


def checkout_folder() -> Path | None:
    """Return the folder whose `src/echelon` this package is; None for an installed package."""
    source = Path(__file__).resolve().parents[2]
    folder = source.parent
    return folder if source.name == "src" and (folder / "pyproject.toml").is_file() else None


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
    if is_installed(name):
        return None
    return PACKAGE_INSTALLED.problem(
        f"{purpose} needs the package {name}, which is not installed",
        set_by=set_by,
        suggestions=(install_command(extra),),
    )


def require_package(name: str, *, extra: str, purpose: str) -> None:
    """Raise EnvironmentProblem where a package is not installed; it is not imported."""
    problem = missing_package(name, extra=extra, purpose=purpose)
    if problem is not None:
        raise EnvironmentProblem(problem)


def is_installed(name: str) -> bool:
    """True if a package or module can be found; it is not imported."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing, or import of it is blocked
        return False
