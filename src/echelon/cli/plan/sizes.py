# SPDX-License-Identifier: Apache-2.0
"""`echelon plan MODEL` without a cluster, where no GPU of this machine is known: four sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from echelon.cli.flags import OUT, bad_argument
from echelon.cli.output import print_json
from echelon.cli.stderr import note, working
from echelon.core.errors import ConfigError
from echelon.planner.recommend.recommend import NO_SIZE
from echelon.planner.search.request import LONGEST_SEQUENCE

if TYPE_CHECKING:
    from echelon.cli.plan.search import SearchOutputOptions
    from echelon.planner.search.request import SearchAim, SearchRequest

_HINT = "--cluster {name}; any COUNTxDEVICE or a cluster file will do."


def plan_on_what_exists(
    model: str,
    wanted: SearchAim,
    shown: SearchOutputOptions,
    *,
    settings: Sequence[str],
    pins: Sequence[str],
    columns: int,
) -> int:
    """Print the answer on the GPUs of this machine, or on four clusters; return the exit code.

    It is 1 where no cluster has a plan.
    """
    from echelon.cli.plan.search import run_search
    from echelon.launch.gpus import own_cluster
    from echelon.planner.answer.sizes import sizes_json, sizes_text
    from echelon.planner.recommend.recommend import four_sizes
    from echelon.planner.search.request import make_request

    own = own_cluster()
    if own.name is not None:
        return run_search(
            model, wanted, shown, cluster=own.name, settings=settings, pins=pins, columns=columns
        )
    _require_no_plan_flags(shown, wanted.objective)

    def request_on(cluster: str) -> SearchRequest:
        return make_request(model, cluster=cluster, settings=settings, pins=pins, aim=wanted)

    with working("searching on four sizes", lines=not shown.json):
        # A table has the plan to run of each size, and no other one.
        found = four_sizes(request_on, alone=not shown.json)
    if shown.json:
        print_json("plan", sizes_json(found))
    elif found:
        print(sizes_text(found, own.unknown, _HINT, columns=columns), end="")
    if not found:
        note(NO_SIZE)
    return 0 if found else 1


def _require_no_plan_flags(shown: SearchOutputOptions, objective: str) -> None:
    """Refuse what is about one plan, where there are four."""
    flags = {
        OUT: bool(shown.files.paths),
        "--why": shown.why,
        "--detail": shown.detail,
        "--objective front": shown.front,
        f"--objective {LONGEST_SEQUENCE}": objective == LONGEST_SEQUENCE,
    }
    if given := [flag for flag, is_given in flags.items() if is_given]:
        problem: ConfigError = bad_argument(
            f"{' and '.join(given)} is about the plans of one cluster, none is named, and this "
            "machine has no GPU that is known",
            "--cluster 8xh100",
        )
        raise problem
