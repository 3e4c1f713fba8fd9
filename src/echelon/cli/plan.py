"""`echelon plan`: check a run file by every rule, and show what the ranks hold and send."""

from __future__ import annotations

from echelon.cli.flags import Json, RunFile, Settings
from echelon.cli.output import print_json


def plan(run: RunFile, /, *, settings: Settings = (), json: Json = False) -> int:
    """Check a run by every rule, before any process starts; show what its ranks hold and send."""
    from echelon.cli.plan_report import plan_json, plan_text
    from echelon.config.load import load_job
    from echelon.config.placement import found_of
    from echelon.config.times_file import times_of

    job = load_job(run, settings)
    times = times_of(job)
    if json:
        print_json("plan", plan_json(job.plan, times))
    else:
        print(plan_text(job.plan, times, found_of(job)), end="")
    return 0
