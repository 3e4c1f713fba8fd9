"""What torchrun starts in these tests: ranks that run jobs which the first of them asks for."""

from __future__ import annotations

import sys

from echelon.core.errors import EchelonError
from echelon.launch.launched.jobs import LaunchedPool, run_launched_jobs, tell_place
from echelon.launch.local.supervisor import DEFAULT_OPTIONS


def main() -> int:
    """Run one rank; print what the drive returned, or the error as the command line does."""
    how, world = sys.argv[1], int(sys.argv[2])

    def drive(pool: LaunchedPool) -> object:
        places = pool.run(tell_place, None, world)
        alone = pool.run("tests.launch.targets:add_ranks", 2.0, 1)
        together = pool.run("tests.launch.targets:add_ranks", 2.0, world)
        if how == "raise":
            pool.run("tests.launch.targets:train", {"rank": 1, "how": "raise"}, world)
        nodes = [(place.local_rank, place.node_size) for place in places]
        return nodes, [one["total"] for one in (*alone, *together)], pool.num_ranks

    try:
        outcome = run_launched_jobs(drive, {}, labels=[""] * world, options=DEFAULT_OPTIONS)
        # One write for each rank: their lines meet in one pipe.
        sys.stdout.write(f"rank {outcome.rank}: {outcome.require()[0]}\n")
    except EchelonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
