"""What torchrun starts in these tests: one rank of a run that may fail in its first attempt."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from echelon.core.errors import EchelonError
from echelon.launch.launched.rank import run_launched_rank
from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import DEFAULT_OPTIONS


def main() -> int:
    """Run one rank; print its result, or the error as the command line does."""
    argument = json.loads(sys.argv[1])
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        argument = {"steps": 3}
    labels = [f"dp{rank}" for rank in range(int(sys.argv[2]))]
    log_dir = Path(sys.argv[3])
    (log_dir / f"process-{os.getpid()}").touch()
    try:
        target = str(argument.pop("target", "train"))
        limits = Limits(
            step_s=argument.pop("step_s", Limits().step_s), desync_s=argument.pop("desync_s", None)
        )
        outcome = run_launched_rank(
            target if ":" in target else f"tests.launch.targets:{target}",
            argument,
            labels=labels,
            log_dir=log_dir,
            options=replace(DEFAULT_OPTIONS, limits=limits),
        )
        # One write for each rank: their lines meet in one pipe.
        sys.stdout.write(f"result {outcome.rank} {outcome.require()}\n")
    except EchelonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
