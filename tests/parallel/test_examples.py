"""The examples of tensor parallelism run, and print what they always printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

EVERY_NUMBER = """\
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

BOTH_ORDERS = """\
Y = gelu(X A) B: 16 tokens, width 32, inner width 128, 2 ranks
gelu(summand of rank 0) + gelu(summand of rank 1): DIFFERENT
column then row:
  forward    1 all_reduce
  backward   1 all_reduce
  each rank  8192 bytes sent, 8192 by the formulas
  equality   Y equal, dX equal, dA equal, dB equal
row then column:
  forward    1 all_reduce, 1 all_gather
  backward   1 all_reduce, 1 all_gather
  each rank  36864 bytes sent, 36864 by the formulas
  equality   Y equal, dX equal, dA equal, dB equal
row then column sends 4.5 times as much
"""


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "printed"),
    [("tensor_parallel_by_hand", EVERY_NUMBER), ("column_then_row", BOTH_ORDERS)],
)
def test_an_example_prints_what_it_shows(name: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == printed
