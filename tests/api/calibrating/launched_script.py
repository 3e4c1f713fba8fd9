"""What torchrun starts in these tests: one rank of a calibration, of the least that can be fitted.

With `pretend` each process of one host stands for a node of its own.
"""

from __future__ import annotations

import os
import sys

from echelon.api.calibrating.machine import calibrate_machine
from echelon.api.calibrating.measuring import QUICK
from echelon.core.errors import EchelonError
from tests.cost.fit.tiny_workload import TINY


def main() -> int:
    """Calibrate; the first rank prints what it is told, and each what it found."""
    out, how = sys.argv[1:]
    if how == "pretend":
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        found = calibrate_machine(out=out, workload=TINY, steps=QUICK, say=print)
    except EchelonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # One write for each rank: their lines meet in one pipe.
    sys.stdout.write(f"rank {found.rank}: {found.cluster.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
