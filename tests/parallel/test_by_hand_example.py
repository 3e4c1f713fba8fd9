"""The example of tensor parallelism by hand runs, and prints what it always printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel_by_hand.py"

PRINTED = """\
one device: 64 weights
  X          1 2 0 -1
  relu(X A)  0 0 6 4 0 0 0 6
  Y          2 -2 0 2
  dX         1 1 -4 1
rank 0: 32 weights
  relu(X A0) 0 0 6 4      its columns of relu(X A)
  summand    2 4 -6 2      of Y, before the all-reduce
  Y          2 -2 0 2
  dX         1 1 -4 1
  sent       all_reduce row.forward 16 bytes
  sent       all_reduce column.backward 16 bytes
rank 1: 32 weights
  relu(X A1) 0 0 0 6      its columns of relu(X A)
  summand    0 -6 6 0      of Y, before the all-reduce
  Y          2 -2 0 2
  dX         1 1 -4 1
  sent       all_reduce row.forward 16 bytes
  sent       all_reduce column.backward 16 bytes
together: inner equal, Y equal, dX equal, dA equal, dB equal
"""


def test_the_example_prints_every_number() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == PRINTED
