# SPDX-License-Identifier: Apache-2.0
"""`echelon observe RUN --mirror TOOL`: give a tracker what it lacks of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from echelon.api.observing import mirror_run
from echelon.cli.flags import bad_argument
from echelon.cli.output import print_result
from echelon.core.choices.trackers import TRACKERS
from echelon.core.rules import did_you_mean


def mirror_in(run: Path, tracker: str, json: bool) -> int:
    """Mirror a run in a tracker, and print how it stands."""
    if tracker not in TRACKERS:
        known = did_you_mean(tracker, TRACKERS) or tuple(TRACKERS)
        raise bad_argument(
            f"--mirror {tracker}: no such tracker", *(f"--mirror {one}" for one in known)
        )
    status = mirror_run(run, tracker)
    print_result(
        "observe",
        lambda: {"run": str(run), **asdict(status)},
        lambda: f"{status.says()}\n",
        as_json=json,
    )
    return 0
