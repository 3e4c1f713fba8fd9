"""Start a run wherever we are: as local ranks of our own, or as one rank of torchrun's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.launch.environment import launched
from echelon.launch.supervisor import LaunchOptions, RunOutcome, run_ranks
from echelon.launch.target import TargetFunction


def start(
    target: str | TargetFunction,
    argument: object,
    *,
    labels: Sequence[str],
    log_dir: Path | None = None,
    options: LaunchOptions | None = None,
) -> RunOutcome:
    """Call ``target(context, argument)`` on one rank per label; join where torchrun started us."""
    if launched():
        from echelon.launch.joined import run_joined

        return run_joined(target, argument, labels=labels, log_dir=log_dir, options=options)
    return run_ranks(
        target,
        argument,
        world_size=len(labels),
        labels=labels,
        log_dir=log_dir,
        options=options,
    )
