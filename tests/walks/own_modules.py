"""Families of `transformers` as users' own modules, proven: `python -m tests.walks.own_modules`.

Each family of `tests/parallel/module/tensor/families.py` is proven under every layout of `LAYOUTS`,
in a file as a user writes it. Exit 1 where one is not proven.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import echelon as ec
from echelon.api.verifying import prove_module
from echelon.core.errors import EchelonError
from tests.parallel.module.tensor.families import FAMILIES

LAYOUTS = (
    ("mesh.tp=2", "mesh.sequence_parallel=false"),
    ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.dp_shard=2", "zero.stage=3"),
    ("mesh.dp_shard=2", "zero.stage=2", "precision.parameters=bf16"),
)
"""Settings of the runs under which each family is proven."""

FILE = """
from tests.parallel.module.tensor import families


def make():
    return families.make({name!r}), families.batch, families.loss_of
"""


def main(names: Sequence[str] | None = None) -> int:
    """Prove families, all or those named; return 1 where one is not proven."""
    chosen, failed, proven = names or list(FAMILIES), 0, 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="echelon-modules-") as folder:
        for name in chosen:
            path = Path(folder) / f"{name}.py"
            path.write_text(FILE.format(name=name), encoding="utf-8")
            for settings in LAYOUTS:
                try:
                    plan = ec.plan("nano", settings=[*settings])
                    prove_module(f"{path}:make", plan).require()
                except EchelonError as error:
                    failed += 1
                    print(f"FAILED  {name}: {' '.join(settings)}\n{error}", flush=True)
                else:
                    proven += 1
                    print(f"proven  {name}: {' '.join(settings)}", flush=True)
    seconds = time.monotonic() - started
    print(f"{proven} of {proven + failed} proven, {len(chosen)} families, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
