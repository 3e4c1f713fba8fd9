# SPDX-License-Identifier: Apache-2.0
"""What a machine needs to make the kernels of a plan, asked for before any rank starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from echelon.core.choices.kernels import Kernels
from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.model import KERNELS_CAN_BE_MADE
from echelon.launch.environment import COMPILER


def require_kernels(
    kernels: Kernels,
    backend: Backend,
    *,
    set_by: str = "",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise EnvironmentProblem where what makes the kernels of a plan is not installed here."""
    missing, way = "", ""
    if kernels.provider != "plain" and backend == "nccl":
        if find_spec("triton") is None:
            missing = "the package triton, which cannot be found"
            way = "the torch from PyPI, whose builds for CUDA bring it"
    elif kernels.provider == "compiled":
        compiler = cpp_compiler(environment)
        if shutil.which(compiler) is None:
            missing = f"a C++ compiler, and there is no {compiler}"
            way = f"install g++, or set {COMPILER} to the compiler that is there"
    if missing:
        raise EnvironmentProblem(
            KERNELS_CAN_BE_MADE.problem(
                f'kernels.provider = "{kernels.provider}" needs {missing}',
                key="kernels.provider",
                set_by=set_by,
                suggestions=('kernels.provider = "plain"', way),
            )
        )


def cpp_compiler(environment: Mapping[str, str]) -> str:
    """Return the compiler that PyTorch calls: $CXX, or what the system usually has."""
    return environment.get(COMPILER) or ("clang++" if sys.platform == "darwin" else "g++")
