"""Every combination of layouts, proven in float64: ``python -m echelon.prove.matrix --all``.

`prove/cases.py` has those of data, tensor and pipeline parallelism, `prove/zero_cases.py` those of
ZeRO, its optimizers and offload, `prove/pipeline_cases.py` those of every pipeline schedule,
`prove/context_cases.py` those of long sequences, `prove/expert_cases.py` those of experts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import echelon
from echelon.core.errors import EchelonError
from echelon.launch.pool import RankPool
from echelon.prove.cases import MAX_WORLD, Case, cases
from echelon.prove.context_cases import ContextCase, context_cases
from echelon.prove.expert_cases import ExpertCase, expert_cases
from echelon.prove.pipeline_cases import PipelineCase, pipeline_cases
from echelon.prove.run import OUR_ENGINE, RankRunner, prove
from echelon.prove.zero_cases import ZeroCase, zero_cases

AnyCase = Case | ZeroCase | PipelineCase | ContextCase | ExpertCase


def every_case() -> list[AnyCase]:
    """Return the whole matrix."""
    return [*cases(), *zero_cases(), *pipeline_cases(), *context_cases(), *expert_cases()]


def prove_case(case: AnyCase, run_ranks: RankRunner, subject: str = OUR_ENGINE) -> str:
    """Return what is wrong with a case; nothing where it is proven."""
    try:
        proof = prove(case.plan(), run_ranks=run_ranks, subject=subject, own_precision=False)
        proof.require()
    except EchelonError as error:
        return str(error)
    return ""


def sample(count: int, seed: int) -> list[AnyCase]:
    """Return `count` random cases: as many of each kind, and half of each of few ranks.

    Eight ranks take longer than four on a small machine; none of these needs more.
    """
    generator = random.Random(seed)
    chosen: list[AnyCase] = []
    kinds: list[list[AnyCase]] = [
        [*cases()],
        [*zero_cases()],
        [*pipeline_cases()],
        [*context_cases()],
        [*expert_cases()],
    ]
    for place, every in enumerate(kinds):
        share = count // len(kinds) + (place < count % len(kinds))
        small = [case for case in every if case.world_size <= MAX_WORLD // 2]
        large = [case for case in every if MAX_WORLD // 2 < case.world_size <= MAX_WORLD]
        chosen += generator.sample(small, share - share // 2)
        chosen += generator.sample(large, share // 2)
    return chosen


def code_hash() -> str:
    """Return a hash of Echelon's own source: a proof of other code is no proof of this."""
    digest = hashlib.sha256()
    root = Path(echelon.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def walk(chosen: Sequence[AnyCase], results: Path | None) -> int:
    """Prove `chosen`, one line each, and return how many failed.

    Cases that `results` (JSON lines) holds as proven with this very code are skipped.
    """
    code = code_hash()
    done = _proven(results, code)
    failed = 0
    started = time.monotonic()
    with RankPool(max((case.world_size for case in chosen), default=1)) as pool:
        for number, case in enumerate(chosen, start=1):
            if case.name in done:
                continue
            problem = prove_case(case, pool.run)
            failed += bool(problem)
            print(f"{number:4}/{len(chosen)}  {'FAILED' if problem else 'proven'}  {case.name}")
            if problem:
                print(problem)
            sys.stdout.flush()
            if results is not None:
                line = {"case": asdict(case), "name": case.name, "code": code, "problem": problem}
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    skipped = sum(case.name in done for case in chosen)
    print(
        f"{len(chosen) - failed} of {len(chosen)} proven ({skipped} of them before), "
        f"{failed} failed, {time.monotonic() - started:.0f} s"
    )
    return failed


def _proven(results: Path | None, code: str) -> set[str]:
    if results is None or not results.exists():
        return set()
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["name"] for line in lines if line["code"] == code and not line["problem"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the matrix, or a random part of it; return 1 where a case is not proven."""
    parser = argparse.ArgumentParser(prog="python -m echelon.prove.matrix", description=__doc__)
    parser.add_argument("--all", action="store_true", help="walk every case")
    parser.add_argument("--count", type=int, default=20, help="random cases to walk (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the random choice")
    parser.add_argument("--match", default="", help="walk the cases whose name contains this")
    parser.add_argument("--results", type=Path, help="JSON lines; proven cases are not run again")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.all or options.match:
        chosen = [case for case in every_case() if options.match in case.name]
    else:
        chosen = sample(options.count, seed)
        print(f"seed {seed}")
    return 1 if walk(chosen, options.results) else 0


if __name__ == "__main__":
    sys.exit(main())
