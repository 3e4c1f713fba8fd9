"""The oracle beside the independent implementation, for random plans of the matrix and all presets.

``python -m echelon.proof.independent.walk --count=60 --seed=7`` takes plans of the matrix, as its
own walk does, and starts no ranks; ``--presets`` takes the models of all presets.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.plan import Plan
from echelon.proof.independent.naming import independent_pass
from echelon.proof.matrix.walk import sample
from echelon.proof.shrink import NUM_STEPS, shrink

ONE_RANK = ("mesh.dp_shard=1", "batch.global_sequences=2", "batch.microbatch_sequences=1")
"""What makes any preset a run of one rank."""


def random_plans(count: int, seed: int) -> Iterator[Plan]:
    """Yield shrunk float64 plans of the matrix, each by the name of its case."""
    for case in sample(count, seed):
        yield replace(shrink(case.plan(), precision="fp64"), name=case.name)


def preset_plans() -> Iterator[Plan]:
    """Yield the models of all presets, shrunk, in float64, each by the name of its preset."""
    for name in preset_names("models"):
        yield replace(shrink(load_job(name, ONE_RANK).plan, precision="fp64"), name=name)


def compare_plans(plans: Iterator[Plan], num_steps: int) -> int:
    """Compare shrunk plans, one line each, and return how many differ."""
    started, failed, worst, number = time.monotonic(), 0, 0.0, 0
    for number, plan in enumerate(plans, start=1):
        found = independent_pass(plan, num_steps)
        error = max(claim.max_error for claim in found.claims)
        failed, worst = failed + (not found.holds), max(worst, error)
        told = f"off by {error:.1e} at most" if found.holds else "DIFFERS"
        print(f"{number:4}  {plan.name}: {told}")
        if found.diagnosis is not None:
            print(found.diagnosis.sentence())
        sys.stdout.flush()
    seconds = time.monotonic() - started
    print(f"{number - failed} of {number} hold, off by {worst:.1e} at most, {seconds:.0f} s")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare random plans or presets; return 1 where one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m echelon.proof.independent.walk", description=__doc__
    )
    parser.add_argument("--count", type=int, default=20, help="random plans of the matrix (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the random choice")
    parser.add_argument("--presets", action="store_true", help="the models of all presets")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"of training ({NUM_STEPS})")
    options = parser.parse_args(arguments)
    if options.presets:
        return 1 if compare_plans(preset_plans(), options.steps) else 0
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    return 1 if compare_plans(random_plans(options.count, seed), options.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
