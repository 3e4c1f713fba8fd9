"""environment.json: what a run ran on, so that a result can be told from its surroundings."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import psutil

from echelon import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pyarrow", "cyclopts", "rich")
RECORDED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH_", "PYTORCH_", "ECHELON_")


def describe_environment(variables: Mapping[str, str]) -> dict[str, object]:
    """Return the machine, the versions, and of the environment what changes how ranks run.

    `variables` is the environment; what is not about the run (and may be a secret) is left out.
    """
    return {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "echelon": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "command": sys.argv,
        "variables": {
            name: value
            for name, value in sorted(variables.items())
            if name.startswith(RECORDED_PREFIXES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
