# SPDX-License-Identifier: Apache-2.0
"""Prove a plan: shrink it, run it on one device and on its ranks, and judge every claim."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.core.messages.notes import PROGRESS
from echelon.core.plan import Plan, Precision
from echelon.core.rulebook.servers import ASYNCHRONOUS_ORDER_IS_NOT_KNOWN
from echelon.layout.islands import inner_plan, without_losses
from echelon.proof.causes.diagnose import diagnose, diagnose_races
from echelon.proof.changes import changes, require_nothing_mended
from echelon.proof.claims.choice_errors import with_ties_of_ranks
from echelon.proof.claims.claims import ClaimResult, judge_races, judge_sums
from echelon.proof.claims.conditioning import judge_conditioned
from echelon.proof.claims.islands import IslandRun, island_evidence, run_island
from echelon.proof.claims.numeric_range import RangeCase, judge_ranges, range_cases
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.tolerance import is_low, own_tolerance, rounded_oracle_runs
from echelon.proof.evidence.evidence import float64_tolerance
from echelon.proof.late import LateRun, require_late_subject, run_late
from echelon.proof.observed import ObservedRun, routing_from_ranks
from echelon.proof.oracle.loss_scale import scale_without_overflow, with_overflow_scale, with_scale
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.ranks import find_factory, read_results
from echelon.proof.replays.runs import RankRunner, replayed, run_with_a_lost_island
from echelon.proof.shrink import DTYPE_SETTINGS, num_rounded_steps, num_steps, shrink
from echelon.proof.sum_bounds import NUM_STEPS as ROUNDED_STEPS
from echelon.proof.sum_bounds import with_exact_sums, with_rounded_sums
from echelon.proof.verdict import Proof, ProofPass, running_versions

OUR_ENGINE = "echelon.training.subject:build"
"""The subject that is proven when none is named."""

_TARGET = "echelon.proof.ranks:run_subject"

QUICK_STEPS = 3
"""Steps of a quick proof."""

LEAST_REPLAYED_STEPS = 4
"""Steps of each worker in an asynchronous run: enough for them to part."""


def prove(
    plan: Plan,
    *,
    run_ranks: RankRunner,
    subject: str = OUR_ENGINE,
    own_precision: bool = True,
    late: bool = False,
    quick: bool = False,
) -> Proof:
    """Return the proof of `plan`: every claim, in float64 and in the plan's own precision.

    `subject` names the engine under proof. `own_precision` False leaves the second part out (the
    matrix of all layouts proves the mathematics only). Ranks are started by `run_ranks`, and take
    as many steps as `proof/shrink.py` says. Offloaded slices lie in a temporary folder.
    ConfigError, before any rank starts, if there is no such subject, or if a number divides another
    in the plan and not in the small plan, or the other way round. With `quick` only the first
    `QUICK_STEPS` steps are run, in float64; the proof names the rest. With `late` all is run once
    more, before, with operations that complete when they are awaited; where that finds a race, it
    is what is judged.
    """
    factory = find_factory(subject)
    require_nothing_mended(plan, shrink(plan))
    if late:
        require_late_subject(subject, factory)
    if plan.mathematics.updates.is_asynchronous:
        if late or quick:
            raise ConfigError(
                ASYNCHRONOUS_ORDER_IS_NOT_KNOWN.problem(
                    "asynchronous servers have no order that a late run would keep, or that a "
                    "quick one would show",
                    key="servers.updates",
                    suggestions=("a proof that is neither late nor quick",),
                )
            )
        exact = shrink(plan, precision="fp64", names_apart=True)
        steps = max(LEAST_REPLAYED_STEPS, num_steps(exact))
        one = replayed(exact, steps, run_ranks=run_ranks, subject=subject)
        return _proof(plan, exact, subject, steps, (one,))
    lost: tuple[ProofPass, ...] = ()
    whole = plan
    if plan.mathematics.local_sgd.is_elastic:
        if not quick:
            lost = (run_with_a_lost_island(plan, run_ranks=run_ranks, subject=subject),)
        plan = without_losses(plan)
    variants, left_out = _variants(plan, own_precision=own_precision), ()
    if quick:
        variants, left_out = _quick_variants(variants)
        left_out += ("the loss of an island",) * whole.mathematics.local_sgd.is_elastic
    # Numbers that are large or tiny are those of one step: the islands of it are trainings alike.
    local = plan.mathematics.local_sgd.active
    ranges = range_cases(variants[-1].plan) if len(variants) > 1 and not local else []
    rounded = with_rounded_sums(variants[0].plan, plan)
    shrunk = [*(one.plan for one in (*variants, *ranges)), *rounded]
    counts = [one.num_steps for one in variants] + [1] * len(ranges)
    counts += [ROUNDED_STEPS] * len(rounded)
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as directory:
        argument = {
            "plans": [offloaded_to(one, directory).to_json() for one in shrunk],
            "subject": subject,
            "num_steps": counts,
        }
        labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]

        def run_into(folder: Path, late: bool = False) -> None:
            steps = f"{sum(counts)} steps of {len(shrunk)} small plans"
            PROGRESS.info(f"{plan.mesh.world_size} ranks run {steps}{', late' * late}")
            told = {**argument, "directory": str(folder), "late": late}
            run_ranks(_TARGET, told, plan.mesh.world_size, labels=labels)

        late_runs: Sequence[LateRun | None] = [None] * len(variants)
        if late:
            late_runs = run_late(
                partial(run_into, late=True),
                [one.plan for one in variants],
                Path(directory, "late"),
                rounded=dict(enumerate(rounded, len(variants) + len(ranges))),
            )
        if any(one is not None and one.races for one in late_runs):
            ranges, rounded = [], []
        else:
            run_into(Path(directory))
        passes = _judge(variants, ranges, rounded, Path(directory), late_runs)
    exact = variants[0]
    proof = _proof(whole, exact.plan, subject, exact.num_steps, (*passes, *lost))
    return replace(proof, left_out=left_out)


def _proof(
    plan: Plan, shrunk: Plan, subject: str, steps: int, passes: tuple[ProofPass, ...]
) -> Proof:
    return Proof(
        plan=plan.name,
        changes=changes(plan, shrunk),
        plan_hash=plan.content_hash(),
        mesh=mesh_text(plan),
        shrunk_plan=shrunk,
        subject=subject,
        seed=plan.mathematics.seed,
        num_steps=steps,
        versions=running_versions(),
        passes=passes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """A plan that is run for so many steps, and the float64 plan that it is compared with."""

    plan: Plan
    reference: Plan
    num_steps: int


def _variants(plan: Plan, *, own_precision: bool) -> list[_Variant]:
    """Return what is run, in float64 first.

    A number that lies next to the middle of two 8-bit numbers may be rounded to either, and the
    difference is 2^15 times that of float64 and float32: nothing else could be seen beside it. So
    the plan's own precision is proven with products of that precision, and with matrices that are
    not rounded to int8. That of 16 bits is run with
    8-bit products, too: what these make of its rounding the one device's own errors say.
    """
    plan = with_exact_sums(plan)
    exact, own = shrink(plan, precision="fp64", names_apart=True), shrink(plan)
    steps, rounded_steps = num_steps(exact), num_rounded_steps(own)
    own_reference = shrink(plan, precision="fp64")
    numbers = replace(own_reference.mathematics, model=own.model)
    own_reference = replace(own_reference, mathematics=numbers)
    scaling = exact.mathematics.precision.loss_scaling
    if scaling != "none":
        scale = scale_without_overflow(inner_plan(own), inner_plan(own_reference), steps)
        own, own_reference = with_scale(own, scale), with_scale(own_reference, scale)
        dynamic = scaling == "dynamic"
        exact = with_overflow_scale(exact, steps) if dynamic else with_scale(exact, scale)
    variants = [_Variant(plan=exact, reference=exact, num_steps=steps)]
    precision = own.mathematics.precision
    if own_precision and not same_dtypes(precision, exact.mathematics.precision):
        plain, plain_reference = without_8_bits(own), without_8_bits(own_reference)
        variants.append(_Variant(plan=plain, reference=plain_reference, num_steps=rounded_steps))
        if precision.is_fp8 and is_low(own):
            variants.append(_Variant(plan=own, reference=own_reference, num_steps=rounded_steps))
    return variants


def same_dtypes(one: Precision, other: Precision) -> bool:
    """Return whether two precisions compute in the same dtypes, whatever scales their loss."""
    return all(getattr(one, name) == getattr(other, name) for name in DTYPE_SETTINGS)


def without_8_bits(plan: Plan) -> Plan:
    """Return the plan without codes of 8 bits: in matmuls, gathers, and messages of islands.

    A number in the middle of two codes may become either of them.
    """
    precision = replace(plan.mathematics.precision, matmul="parameters", int8_block=0)
    layout = replace(plan.layout, zero=replace(plan.layout.zero, gather="parameters"))
    local = replace(plan.mathematics.local_sgd, gradients="fp32")
    mathematics = replace(plan.mathematics, precision=precision, local_sgd=local)
    return replace(plan, mathematics=mathematics, layout=layout)


def _quick_variants(variants: Sequence[_Variant]) -> tuple[list[_Variant], tuple[str, ...]]:
    """Float64 alone for `QUICK_STEPS` steps, or for a round of local SGD, and names of the rest."""
    exact, *others = variants
    local = exact.plan.mathematics.local_sgd.active
    steps = exact.num_steps if local else min(exact.num_steps, QUICK_STEPS)
    left_out = [_name_of(other.plan, exact=False) for other in others]
    if steps < exact.num_steps:
        left_out.append(f"{exact.num_steps - steps} of {exact.num_steps} steps")
    return [replace(exact, num_steps=steps)], tuple(left_out)


def _name_of(plan: Plan, *, exact: bool) -> str:
    """Return what a pass is called: by its dtype, and by its products where there are two."""
    precision = plan.mathematics.precision
    return precision.parameters + ", fp8" * (precision.is_fp8 and not exact)


def offloaded_to(plan: Plan, directory: str) -> Plan:
    """Return the plan with its files in a folder, where it has any."""
    zero = replace(plan.layout.zero, offload_dir=directory)
    used = "nvme" in (zero.optimizer_offload, zero.parameter_offload)
    return replace(plan, layout=replace(plan.layout, zero=zero)) if used else plan


def _judge(
    variants: Sequence[_Variant],
    ranges: Sequence[RangeCase],
    rounded_sums: Sequence[Plan],
    directory: Path,
    late_runs: Sequence[LateRun | None],
) -> tuple[ProofPass, ...]:
    oracles: dict[str, tuple[OracleStep, ...]] = {}
    passes: list[ProofPass] = []
    raced = any(late is not None and late.races for late in late_runs)
    for number, (one, late) in enumerate(zip(variants, late_runs, strict=False)):
        plan, reference, steps = one.plan, one.reference, one.num_steps
        PROGRESS.info(f"one process runs in {plan.mathematics.precision.parameters}")
        if plan.mathematics.local_sgd.active and not (
            raced and (late is None or not late.observed)
        ):
            run = IslandRun(
                plan=plan,
                reference=reference,
                num_steps=steps,
                number=number,
                directory=directory,
            )
            passes += _island_passes(run, late, broken=any(not earlier.holds for earlier in passes))
            continue
        if not raced:
            observed = ObservedRun(plan, read_results(directory, number, plan.mesh.world_size))
        elif late is not None and late.observed is not None:
            observed = late.observed
        else:
            passes += _raced_passes(plan, reference, late)
            continue
        # Where tokens go is a matter of rounding in a precision of few digits, and of none here.
        forced = routing_from_ranks(observed, steps) if number else None
        # The float64 oracle also judges the plan's own precision: first values are rounded to
        # float32 before any dtype, so both begin from the same numbers.
        key = reference.content_hash()
        if forced is not None or key not in oracles:
            oracles[key] = run_oracle(reference, steps, forced=forced)
        oracle = oracles[key][:steps]
        if not number:
            oracle = with_ties_of_ranks(reference, oracle, observed)
        tolerance = float64_tolerance()
        rounded: list[tuple[OracleStep, ...]] = []
        if number:
            rounded = rounded_oracle_runs(plan, steps, forced)
            masters = observed.has_masters
            tolerance = own_tolerance(plan, oracle, rounded, has_masters=masters)
        evidence = PlanEvidence(
            plan=plan,
            reference_plan=reference,
            steps=oracle,
            run=observed,
            tolerance=tolerance,
            late=late,
            rounded=rounded,
        )
        evidence, results = judge_conditioned(
            evidence,
            lambda initial, forced, plan=plan, steps=steps: run_oracle(
                plan, steps, initial=initial, forced=forced
            ),
        )
        for extra in rounded_sums if not number else ():
            place = len(variants) + len(ranges)
            found = read_results(directory, place, plan.mesh.world_size)
            results += judge_sums(evidence, ObservedRun(extra, found))
        if number and ranges:
            results += (_judge_ranges(ranges, directory, first=len(variants)),)
        broken = any(not earlier.holds for earlier in passes)
        passes.append(
            ProofPass(
                precision=_name_of(plan, exact=not number),
                claims=results,
                # A wrong factor is the same in both precisions: it is told once, where it is clear.
                diagnosis=None
                if broken
                else diagnose_races(late, results) or diagnose(evidence, results),
            )
        )
    return tuple(passes)


def _island_passes(run: IslandRun, late: LateRun | None, *, broken: bool) -> list[ProofPass]:
    """Return a pass for each island; the first that is wrong is told what is."""
    passes: list[ProofPass] = []
    for island, first in enumerate(island_evidence(run, late)):
        evidence, results = judge_conditioned(first, partial(run_island, run, island))
        told = broken or any(not earlier.holds for earlier in passes)
        named = None if told else diagnose_races(late, results) or diagnose(evidence, results)
        precision = f"{_name_of(run.plan, exact=not run.number)}, island {island}"
        passes.append(ProofPass(precision=precision, claims=results, diagnosis=named))
    return passes


def _judge_ranges(ranges: Sequence[RangeCase], directory: Path, *, first: int) -> ClaimResult:
    """Return the claim about numbers that are large or tiny; `first` is the number of its plan."""
    found = [
        (case, ObservedRun(case.plan, read_results(directory, number, case.plan.mesh.world_size)))
        for number, case in enumerate(ranges, start=first)
    ]
    return judge_ranges(found)


def _raced_passes(plan: Plan, reference: Plan, late: LateRun | None) -> list[ProofPass]:
    """Return the claims of a run that races made end with an error: those about its races."""
    evidence = PlanEvidence(
        plan=plan,
        reference_plan=reference,
        steps=(),
        run=ObservedRun(plan, ()),
        tolerance=float64_tolerance(),
        late=late,
    )
    results = judge_races(evidence)
    if not results:
        return []
    return [
        ProofPass(
            precision=plan.mathematics.precision.parameters,
            claims=results,
            diagnosis=diagnose_races(late, results),
        )
    ]


def mesh_text(plan: Plan) -> str:
    """Return the degrees above 1 of a mesh, as users read them: ``pp2 x dp4 x tp2``."""
    mesh = plan.mesh
    degrees = {"pp": mesh.pp, **mesh.data_degrees, "cp": mesh.cp, "tp": mesh.tp}
    ranks = " x ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "1"
    ranks += f", ep{mesh.ep}" if mesh.ep > 1 else ""
    if mesh.servers:
        ranks += f" + {mesh.servers} server{'s' * (mesh.servers > 1)}"
    fused = plan.layout.tp_overlap == "symmetric-memory"
    return f"{ranks}, fused products as a ring," if fused else ranks
