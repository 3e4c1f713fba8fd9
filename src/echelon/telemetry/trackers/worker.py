# SPDX-License-Identifier: Apache-2.0
"""The process of one mirror: `python -m echelon.telemetry.trackers.worker RUN TOOL PROJECT`.

It follows the run until its standard input ends, mirrors what is left, and ends with 0. What goes
wrong is printed and ends it with 1; whoever started it may start it again.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from pathlib import Path

from echelon.core.errors import EchelonError
from echelon.telemetry.trackers.mirror import Mirror
from echelon.telemetry.trackers.progress import mirrored_alone

FAILED = "the mirror failed: "
"""How the line begins that says why a mirror ended, among whatever else a package prints."""
_LOOK_S = 1.0  # s between two looks


def mirror_until_end(mirror: Mirror, ended: int) -> None:
    """Mirror what a run adds, until the pipe `ended` ends and nothing new is there."""
    final = False
    while True:
        new = mirror.look(final=final)
        if final and not new:
            mirror.close()
            return
        if not final and select.select([ended], [], [], 0.0 if new else _LOOK_S)[0]:
            final = not os.read(ended, 4096)


def main(arguments: list[str]) -> int:
    """Mirror one run in one tracker; return the exit status."""
    run, tracker, project = Path(arguments[0]), arguments[1], arguments[2]
    try:
        with mirrored_alone(run, tracker):
            mirror_until_end(Mirror(run, tracker, project), sys.stdin.fileno())
    except Exception as error:  # Whatever a tracker's package raises.
        if not isinstance(error, EchelonError):
            traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{FAILED}{said}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
