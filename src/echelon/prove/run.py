"""Prove a plan: shrink it, run it on one device and on its ranks, and judge every claim."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import echelon
from echelon.core.plan import Plan
from echelon.prove.checks import Evidence
from echelon.prove.claims import judge
from echelon.prove.diagnose import diagnose
from echelon.prove.observed import Observed
from echelon.prove.oracle import run_oracle
from echelon.prove.proof import Proof, ProofPass
from echelon.prove.ranks import find_factory, read_results
from echelon.prove.shrink import NUM_STEPS, shrink
from echelon.prove.tolerance import float64_tolerance, own_tolerance

OUR_ENGINE = "echelon.train.subject:build"
"""The subject that is proven when none is named."""

_TARGET = "echelon.prove.ranks:run_subject"


class RankRunner(Protocol):
    """Start ranks that call ``target(context, argument)`` in one process group, and wait.

    `launch.pool.RankPool.run` is one.
    """

    def __call__(
        self, target: str, argument: object, world_size: int, /, *, labels: Sequence[str]
    ) -> object:
        """Return when all ranks have; raise what the first failing rank raised."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One precision in which the plan is proven, and the float64 plan it is compared with."""

    name: str
    plan: Plan


def prove(
    plan: Plan,
    *,
    run_ranks: RankRunner,
    subject: str = OUR_ENGINE,
    num_steps: int = NUM_STEPS,
    own_precision: bool = True,
) -> Proof:
    """Return the proof of `plan`: every claim, in float64 and in the plan's own precision.

    `subject` names the engine under proof. `own_precision` False leaves the second part out (the
    matrix of all layouts proves the mathematics only). Ranks are started by `run_ranks`.
    ConfigError, before any rank starts, where there is no such subject.
    """
    find_factory(subject)
    variants = _variants(plan, own_precision=own_precision)
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as directory:
        argument = {
            "plans": [variant.plan.to_json() for variant in variants],
            "subject": subject,
            "directory": directory,
            "num_steps": num_steps,
        }
        labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
        run_ranks(_TARGET, argument, plan.mesh.world_size, labels=labels)
        passes = _judge(variants, Path(directory), num_steps)
    return Proof(
        plan=plan.name,
        plan_hash=plan.content_hash(),
        mesh=_mesh(plan),
        shrunk_plan=variants[0].plan,
        subject=subject,
        seed=plan.mathematics.seed,
        num_steps=num_steps,
        versions={
            "echelon": echelon.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        passes=passes,
    )


def _variants(plan: Plan, *, own_precision: bool) -> list[_Variant]:
    exact, own = shrink(plan, precision="fp64"), shrink(plan)
    variants = [_Variant(name="fp64", plan=exact)]
    if own_precision and own.mathematics.precision != exact.mathematics.precision:
        variants.append(_Variant(name=own.mathematics.precision.parameters, plan=own))
    return variants


def _judge(variants: Sequence[_Variant], directory: Path, num_steps: int) -> tuple[ProofPass, ...]:
    reference = run_oracle(variants[0].plan, num_steps)
    passes: list[ProofPass] = []
    for number, variant in enumerate(variants):
        plan = variant.plan
        evidence = Evidence(
            plan=plan,
            # The float64 oracle also judges the plan's own precision: first values are rounded to
            # float32 before any dtype, so both begin from the same numbers.
            reference_plan=variants[0].plan,
            oracle=reference,
            observed=Observed(plan, read_results(directory, number, plan.mesh.world_size)),
            tolerance=float64_tolerance()
            if number == 0
            else own_tolerance(plan, reference, run_oracle(plan, num_steps)),
        )
        results = judge(evidence)
        broken = any(not earlier.holds for earlier in passes)
        passes.append(
            ProofPass(
                precision=variant.name,
                claims=results,
                # A wrong factor is the same in both precisions: it is told once, where it is clear.
                diagnosis=None if broken else diagnose(evidence, results),
            )
        )
    return tuple(passes)


def _mesh(plan: Plan) -> str:
    mesh = plan.mesh
    degrees = {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp}
    return " x ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "1"
