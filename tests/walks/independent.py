"""The oracle beside the independent implementation, for random plans and presets, without ranks.

``python -m tests.walks.independent --count=60 --seed=7`` takes plans of the matrix,
``--space`` plans of the whole space of settings (those that no rule refuses), ``--presets`` the
models of all presets.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.proof.independent.comparison import TRANSFORMERS, independent_pass
from echelon.proof.oracle.loss_scale import with_overflow_scale
from echelon.proof.shrink import num_steps, shrink
from tests.walks.matrix.walk import sample
from tests.walks.plans.random_settings import PRESET, flags_of, settings_of

ONE_RANK = ("mesh.dp_shard=1", "batch.global_sequences=2", "batch.microbatch_sequences=1")
"""What makes any preset a run of one rank."""

_MOST_STEPS = 100  # more than any proof takes


def exact_plan(plan: Plan, name: str) -> Plan:
    """Return the float64 plan that a proof runs; with a dynamic loss scale steps overflow in it."""
    small = replace(shrink(plan, precision="fp64"), name=name)
    dynamic = small.mathematics.precision.loss_scaling == "dynamic"
    return with_overflow_scale(small, num_steps(small)) if dynamic else small


def matrix_plans(count: int, seed: int) -> Iterator[Plan]:
    """Yield plans of the matrix, each by the name of its case."""
    for case in sample(count, seed):
        yield exact_plan(case.plan(), case.name)


def space_plans(count: int, seed: int) -> Iterator[Plan]:
    """Yield plans of the whole space, each by its settings, but for those that a rule refuses."""
    with tempfile.TemporaryDirectory(prefix="echelon-random-") as offload_dir:
        for number in range(count):
            flags = flags_of(settings_of(seed, number, offload_dir))
            try:
                job = load_job(PRESET, flags)
            except ConfigError:
                continue
            # What loads is a plan: a refusal from here on ends the walk.
            require_trainable(job.plan, job.sources)
            yield exact_plan(job.plan, f"{number}: {' '.join(flags)}")


def preset_plans() -> Iterator[Plan]:
    """Yield the models of all presets, each by the name of its preset."""
    for name in preset_names("models"):
        yield exact_plan(load_job(name, ONE_RANK).plan, name)


def compare_plans(plans: Iterator[Plan], most_steps: int) -> int:
    """Compare plans for as many steps as a proof takes, and return how many differ."""
    started, failed, worst, number = time.monotonic(), 0, 0.0, 0
    for number, plan in enumerate(plans, start=1):
        found = independent_pass(plan, min(most_steps, num_steps(plan)))
        error = max(claim.max_error for claim in found.claims)
        failed, worst = failed + (not found.holds), max(worst, error)
        told = f"off by {error:.1e} at most" if found.holds else "DIFFERS"
        notes = (claim.note for claim in found.claims if claim.statement == TRANSFORMERS)
        beside = found.note or f"compared with {next(notes)} too"
        print(f"{number:4}  {plan.name}: {told}; {beside}")
        if found.diagnosis is not None:
            print(found.diagnosis.sentence())
        sys.stdout.flush()
    seconds = time.monotonic() - started
    print(f"{number - failed} of {number} hold, off by {worst:.1e} at most, {seconds:.0f} s")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare random plans or presets; return 1 where one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.walks.independent", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="random plans (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the random choice")
    parser.add_argument("--space", action="store_true", help="plans of the whole space of settings")
    parser.add_argument("--presets", action="store_true", help="the models of all presets")
    parser.add_argument("--steps", type=int, default=_MOST_STEPS, help="of training, at most")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.presets:
        plans = preset_plans()
    else:
        print(f"seed {seed}")
        plans = (space_plans if options.space else matrix_plans)(options.count, seed)
    return 1 if compare_plans(plans, options.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
