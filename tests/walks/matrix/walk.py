"""Every combination of layouts, proven in float64: ``python -m tests.walks.matrix.walk --all``.

Each family of cases is a file beside this one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.core.errors import EchelonError
from echelon.core.version import source_hash
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import RankRunner
from echelon.proof.whole_run.whole_run import prove_with_whole_run
from tests.walks.matrix.block_cases import block_cases
from tests.walks.matrix.cases import MAX_WORLD, MatrixCase, cases
from tests.walks.matrix.context_cases import context_cases
from tests.walks.matrix.expert_cases import expert_cases
from tests.walks.matrix.pipeline_cases import pipeline_cases
from tests.walks.matrix.recompute_cases import recompute_cases
from tests.walks.matrix.zero_cases import zero_cases


def families() -> list[list[MatrixCase]]:
    """Return the whole matrix, family by family."""
    every = (
        *(cases, zero_cases, pipeline_cases, context_cases, expert_cases),
        *(recompute_cases, block_cases),
    )
    return [list(family()) for family in every]


def every_case() -> list[MatrixCase]:
    """Return the whole matrix."""
    return [case for family in families() for case in family]


def prove_case(
    case: MatrixCase, run_ranks: RankRunner, subject: str | None = None, *, late: bool = False
) -> str:
    """Return the error of a case, "" if it and a whole run of our own engine are proven."""
    try:
        proof = prove_with_whole_run(
            case.plan(), run_ranks=run_ranks, subject=subject, own_precision=False, late=late
        )
        proof.require()
    except EchelonError as error:
        return str(error)
    return ""


def sample(count: int, seed: int) -> list[MatrixCase]:
    """Return `count` random cases: as many of each kind, and half of each of few ranks.

    Eight ranks take longer than four on a small machine; none of these needs more.
    """
    generator = random.Random(seed)
    chosen: list[MatrixCase] = []
    kinds = families()
    for place, every in enumerate(kinds):
        share = count // len(kinds) + (place < count % len(kinds))
        small = [case for case in every if case.world_size <= MAX_WORLD // 2]
        large = [case for case in every if MAX_WORLD // 2 < case.world_size <= MAX_WORLD]
        chosen += generator.sample(small, share - share // 2)
        chosen += generator.sample(large, share // 2)
    return chosen


def share_of_each(share: float, seed: int) -> list[MatrixCase]:
    """Return a random `share` (0 to 1) of the cases of each family, rounded up."""
    generator = random.Random(seed)
    return [
        case
        for family in families()
        for case in generator.sample(family, math.ceil(share * len(family)))
    ]


def prove_cases(chosen: Sequence[MatrixCase], results: Path | None, *, late: bool = False) -> int:
    """Prove `chosen`, one line each, and return how many failed.

    Cases that `results` (JSON lines) holds as proven with this very code are skipped.
    """
    # A proof of other code is no proof of this, and one without late completion none with it.
    code = source_hash()[:16] + ("-late" if late else "")
    done = {line["name"] for line in lines_of(results, code) if not line["problem"]}
    failed = 0
    started = time.monotonic()
    with RankPool(max((case.world_size for case in chosen), default=1)) as pool:
        for number, case in enumerate(chosen, start=1):
            if case.name in done:
                continue
            problem = prove_case(case, pool.run, late=late)
            failed += bool(problem)
            print(f"{number:4}/{len(chosen)}  {'FAILED' if problem else 'proven'}  {case.name}")
            if problem:
                print(problem)
            sys.stdout.flush()
            line = {"case": asdict(case), "name": case.name, "code": code, "problem": problem}
            append_line(results, line)
    skipped = sum(case.name in done for case in chosen)
    print(
        f"{len(chosen) - failed} of {len(chosen)} proven ({skipped} of them before), "
        f"{failed} failed, {time.monotonic() - started:.0f} s"
    )
    return failed


def lines_of(results: Path | None, code: str) -> list[dict[str, Any]]:
    """Return the lines of earlier walks over this very code."""
    if results is None or not results.exists():
        return []
    lines = results.read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["code"] == code]


def append_line(results: Path | None, line: Mapping[str, object]) -> None:
    """Write down how one case fared, where results are kept."""
    if results is not None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the matrix, or a random part of it; return 1 where a case is not proven."""
    parser = argparse.ArgumentParser(prog="python -m tests.walks.matrix.walk", description=__doc__)
    parser.add_argument("--all", action="store_true", help="walk every case")
    parser.add_argument("--count", type=int, default=20, help="random cases to walk (20)")
    parser.add_argument("--share", type=float, help="walk this share of each family: 0.1")
    parser.add_argument("--seed", type=int, default=None, help="of the random choice")
    parser.add_argument("--match", default="", help="walk the cases whose name contains this")
    parser.add_argument("--results", type=Path, help="JSON lines; proven cases are not run again")
    parser.add_argument(
        "--late", action="store_true", help="also complete operations as late as they may"
    )
    options = parser.parse_args(arguments)
    if options.share is not None and not 0 < options.share <= 1:
        parser.error(f"--share is above 0 and at most 1, not {options.share:g}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.all or options.match:
        chosen = [case for case in every_case() if options.match in case.name]
    else:
        wanted = options.share
        chosen = share_of_each(wanted, seed) if wanted else sample(options.count, seed)
        print(f"seed {seed}")
    return 1 if prove_cases(chosen, options.results, late=options.late) else 0


if __name__ == "__main__":
    sys.exit(main())
