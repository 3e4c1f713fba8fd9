# SPDX-License-Identifier: Apache-2.0
"""The comparisons behind each claim: one oracle value beside what the ranks said of it.

Errors are relative and norm-wise: ``|observed - oracle| / max(|oracle|, floor)``, per tensor, the
largest over all ranks that hold a part of it. The floor is 1e-4 of the norm of all tensors of that
kind together: some gradients are zero by mathematics (a key bias shifts all scores of a softmax
alike), and what is left of them is the rounding of larger numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import product

import torch

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from echelon.layout.islands import Island
from echelon.proof.claims.tolerance import Tolerance
from echelon.proof.late import LateRun
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.local_sgd import OuterStep
from echelon.proof.oracle.oracle import OracleStep, initial_parameters
from echelon.proof.ranks import INITIAL
from echelon.proof.subject import StepRecord
from echelon.schedule.from_plan import stage_placement_from_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsEvidence:
    """Hold what an island of local SGD has in common with the others.

    `plan` is that of all, `outer` what the oracle made of each meeting, `observed` what the ranks
    of each island said.
    """

    plan: Plan
    island: Island
    outer: Sequence[OuterStep]
    observed: Sequence[ObservedRun]

    @property
    def local(self) -> LocalSgd:
        """Return how often islands meet, and what they make of it."""
        return self.plan.mathematics.local_sgd

    def changed(self, step: int) -> Collection[str]:
        """Return the tensors that an outer step at the end of `step` changes."""
        return self.outer[step].changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Hold the two sides of a proof in one precision.

    `plan` is what the ranks ran; `oracle` is float64 in every precision, and `reference_plan` the
    plan that it ran. `rounded` is one device in the precision of the ranks, where that is not
    float64, rounded in several ways; `late` is the run with late completion, where there was one.
    Of an island of local SGD `rounds` is what it shares with the others.
    """

    plan: Plan
    reference_plan: Plan
    oracle: Sequence[OracleStep]
    observed: ObservedRun
    tolerance: Tolerance
    late: LateRun | None = None
    rounded: Sequence[Sequence[OracleStep]] = ()
    rounds: RoundsEvidence | None = None

    def changed_outside(self, step: int) -> Collection[str]:
        """Return the values that an outer step changes at the end of `step`, after the inner."""
        return () if self.rounds is None else self.rounds.changed(step)

    def reports(self) -> Iterator[tuple[OracleStep, int, StepRecord]]:
        """Yield each step of one device beside what each rank said of it."""
        for oracle in self.oracle:
            for rank, report in enumerate(self.observed.reports(oracle.step)):
                yield oracle, rank, report


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: its error, what that may be; `position` orders those of a step by cause."""

    step: int
    subject: str
    error: float
    _: KW_ONLY
    allowed: float = 0.0
    detail: str = ""
    position: int = 0


def relative_error(observed: torch.Tensor, oracle: torch.Tensor, floor: float) -> float:
    """Return the norm-wise relative error, in float64."""
    oracle = oracle.double()
    scale = max(float(oracle.norm()), floor)
    error = float((observed.double() - oracle).norm())
    return error / scale if scale else (0.0 if error == 0.0 else math.inf)


def tensor_error(
    observed: ObservedRun, kind: str, step: int, name: str, oracle: torch.Tensor
) -> float:
    """Return the error of a piece of `name` that is furthest off, scaled by the whole tensor."""
    pieces = observed.shards(kind, step, name)
    if not pieces or not all(observed.fits(piece) for piece in pieces):
        return math.inf
    errors = [
        float((piece.tensor.double() - oracle[piece.region].double()).norm()) for piece in pieces
    ]
    whole = float((observed.whole(kind, step, name) - oracle.double()).norm())
    return max((*errors, whole), key=_nan_last)


def initial_weights(evidence: Evidence) -> Iterator[Check]:
    """Compare the first weights of every rank with those of the seed, bit for bit."""
    observed, right = evidence.observed, initial_parameters(evidence.plan)
    for kind, (position, (name, oracle)) in product(observed.value_kinds, enumerate(right.items())):
        pieces = [p for p in observed.shards(kind, INITIAL, name) if observed.fits(p)]
        same = [torch.equal(p.tensor, oracle[p.region].to(p.tensor.dtype)) for p in pieces]
        error = tensor_error(observed, kind, INITIAL, name, oracle)
        error = error / max(float(oracle.norm()), 1.0)
        yield Check(
            INITIAL,
            name,
            0.0 if same and all(same) else max(error, 5e-324),
            detail="" if kind == "parameters" else "the master copy",
            position=position,
        )


def nothing_dropped(evidence: Evidence) -> Iterator[Check]:
    """Compare what the ranks hold, read and ran with the model and the batch."""
    observed = evidence.observed
    kinds = [(kind, INITIAL) for kind in observed.value_kinds]
    for oracle in evidence.oracle:
        kinds += [(kind, oracle.step) for kind in ("gradients", *observed.value_kinds)]
    for kind, step in kinds:
        for name in observed.names(kind, step) - observed.specs.keys():
            yield exact_check(step, name, f"{name} is not a parameter of the model")
        for position, (name, spec) in enumerate(observed.specs.items()):
            if kind == "gradients" and spec.frozen:
                continue
            problem = observed.coverage_problem(kind, step, name)
            yield exact_check(step, name, problem and f"{kind}: {problem}", position)
    for oracle in evidence.oracle:
        yield from _samples(evidence, oracle.step)
        yield from _layers(evidence, oracle.step)


def exact_check(step: int, subject: str, problem: str, position: int = 0) -> Check:
    """Return the check of something that is as it must be, or has a problem."""
    return Check(step, subject, float(bool(problem)), detail=problem, position=position)


def dp_rank_of(plan: Plan, rank: int) -> int:
    """Return which share of the samples `rank` reads: dp_replicate major, dp_shard minor."""
    here = plan.mesh.coordinates(rank)
    return here[Axis.DP_REPLICATE] * plan.mesh.dp_shard + here[Axis.DP_SHARD]


def _samples(evidence: Evidence, step: int) -> Iterator[Check]:
    plan, every = evidence.plan, global_batch(evidence.plan, step).sample_ids
    share = len(every) // plan.mesh.dp
    ids = [every[replica * share : (replica + 1) * share] for replica in range(plan.mesh.dp)]
    for rank, report in enumerate(evidence.observed.reports(step)):
        if plan.mesh.is_server(rank):
            read_here = f"rank {rank} is a server and read samples" if report.samples else ""
            yield exact_check(step, f"samples of rank {rank}", read_here, position=rank - 1000)
            continue
        read, dp_rank, problem = set(report.samples), dp_rank_of(plan, rank), ""
        if sorted(report.samples) != sorted(ids[dp_rank]):
            others = [f"dp {other}" for other, own in enumerate(ids) if read & set(own)]
            whose = " and ".join(others) or "no replica"
            problem = f"rank {rank} is dp {dp_rank} but read the samples of {whose}"
        yield exact_check(step, f"samples of rank {rank}", problem, position=rank - 1000)


def _layers(evidence: Evidence, step: int) -> Iterator[Check]:
    """Compare the blocks that the ranks of each pipeline ran with those of the model.

    One rank runs a block, or two where microbatches cross the pipeline both ways.
    """
    plan = evidence.plan
    placement = stage_placement_from_plan(plan)
    copies = {
        block: len(placement.owners_of(stage))
        for stage, blocks in enumerate(plan.layout.pipeline.stages)
        for block in blocks
    }
    reports = evidence.observed.reports(step)
    for position, ranks in enumerate(plan.mesh.groups(Axis.PP)):
        ran = Counter(block for rank in ranks for block in set(reports[rank].layers))
        wrong = [block for block, owners in copies.items() if ran[block] != owners]
        subject, problem = f"blocks of ranks {list(ranks)}", ""
        if wrong:
            block, times = wrong[0], ran[wrong[0]]
            subject = f"layers.{block}"
            problem = f"{times or 'none'} of ranks {list(ranks)} ran block {block}"
            problem += f"; {copies[block]} must" if times else ""
        yield exact_check(step, subject, problem, position=position - 500)


def token_count(evidence: Evidence) -> Iterator[Check]:
    """Compare the valid tokens that each rank counted with those of the global batch."""
    for oracle, rank, report in evidence.reports():
        error = abs(report.tokens - oracle.tokens) / oracle.tokens
        detail = f"{report.tokens} instead of {oracle.tokens}"
        yield Check(oracle.step, f"tokens of rank {rank}", error, detail=detail)


def microbatch_losses(evidence: Evidence) -> Iterator[Check]:
    """Compare the loss sum and the valid tokens of each microbatch of each replica."""
    for oracle in evidence.oracle:
        reported = evidence.observed.microbatch_losses(oracle.step)
        for position, (slot, (total, count)) in enumerate(oracle.microbatch_losses.items()):
            values = reported.get(slot, [])
            errors = [abs(value - total) / total for value, _ in values]
            wrong_count = [n for _, n in values if n != count]
            detail = f"{values[0][0]:.10g} instead of {total:.10g}" if values else "nobody has it"
            if wrong_count:
                detail = f"{wrong_count[0]} valid tokens instead of {count}"
            yield Check(
                oracle.step,
                f"loss of dp {slot[0]} microbatch {slot[1]}",
                math.inf if wrong_count or not values else max(errors, key=_nan_last),
                allowed=evidence.tolerance.allowed("losses", oracle.step, str(slot)),
                detail=detail,
                position=position,
            )


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error


def scalar(kind: str, attribute: str) -> Callable[[Evidence], Iterator[Check]]:
    """Return the checks of one number, attribute `attribute` of each report, told as `kind`."""

    def checks(evidence: Evidence) -> Iterator[Check]:
        for oracle, rank, report in evidence.reports():
            value, wanted = getattr(report, attribute), getattr(oracle, attribute)
            # A step whose gradients overflow has no norm, on one device or on many.
            none = not math.isfinite(wanted) and not math.isfinite(value)
            yield Check(
                oracle.step,
                f"{kind} of rank {rank}",
                0.0 if none else abs(value - wanted) / wanted,
                allowed=evidence.tolerance.allowed(attribute, oracle.step, ""),
                detail=f"{value:.10g} instead of {wanted:.10g}",
                position=rank,
            )

    return checks
