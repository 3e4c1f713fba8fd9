"""The comparisons behind each claim: one oracle value beside what the ranks said of it.

Errors are relative and norm-wise: ``|observed - oracle| / max(|oracle|, floor)``, per tensor, the
largest over all ranks that hold a part of it. The floor is 1e-4 of the norm of all tensors of that
kind together: some gradients are zero by mathematics (a key bias shifts all scores of a softmax
alike), and what is left of them is the rounding of larger numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.prove.batches import global_batch
from echelon.prove.observed import Observed
from echelon.prove.oracle import OracleStep, initial_parameters
from echelon.prove.ranks import INITIAL
from echelon.prove.tolerance import Tolerance
from echelon.schedule.of_plan import placement_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Hold the two sides of a proof in one precision.

    `plan` is what the ranks ran; `oracle` is float64 in every precision, and `reference_plan` the
    plan that it ran.
    """

    plan: Plan
    reference_plan: Plan
    oracle: Sequence[OracleStep]
    observed: Observed
    tolerance: Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: its error, and what the error may be."""

    step: int
    subject: str
    error: float
    allowed: float
    detail: str = ""
    position: int = 0


def relative_error(observed: torch.Tensor, oracle: torch.Tensor, floor: float) -> float:
    """Return the norm-wise relative error, in float64."""
    oracle = oracle.double()
    scale = max(float(oracle.norm()), floor)
    error = float((observed.double() - oracle).norm())
    return error / scale if scale else (0.0 if error == 0.0 else math.inf)


def tensor_error(
    observed: Observed, kind: str, step: int, name: str, oracle: torch.Tensor
) -> float:
    """Return the error of a piece of `name` that is furthest off, scaled by the whole tensor."""
    pieces = observed.pieces(kind, step, name)
    if not pieces or not all(observed.fits(piece) for piece in pieces):
        return math.inf
    errors = [
        float((piece.tensor.double() - oracle[piece.region].double()).norm()) for piece in pieces
    ]
    whole = float((observed.whole(kind, step, name) - oracle.double()).norm())
    return max((*errors, whole), key=lambda e: math.inf if math.isnan(e) else e)


def initial_weights(evidence: Evidence) -> Iterator[Check]:
    """Compare the first weights of every rank with those of the seed, bit for bit."""
    yield from _initial(evidence, "parameters")
    if evidence.observed.tells_masters:
        yield from _initial(evidence, "masters")


def _initial(evidence: Evidence, kind: str) -> Iterator[Check]:
    observed = evidence.observed
    for position, (name, oracle) in enumerate(initial_parameters(evidence.plan).items()):
        pieces = [p for p in observed.pieces(kind, INITIAL, name) if observed.fits(p)]
        same = [torch.equal(p.tensor, oracle[p.region].to(p.tensor.dtype)) for p in pieces]
        error = tensor_error(observed, kind, INITIAL, name, oracle)
        error = error / max(float(oracle.norm()), 1.0)
        yield Check(
            step=INITIAL,
            subject=name,
            error=0.0 if same and all(same) else max(error, 5e-324),
            allowed=0.0,
            detail="" if kind == "parameters" else "the master copy",
            position=position,
        )


def nothing_dropped(evidence: Evidence) -> Iterator[Check]:
    """Compare what the ranks hold, read and ran with the model and the batch."""
    observed = evidence.observed
    values = ("parameters", "masters") if observed.tells_masters else ("parameters",)
    kinds = [(kind, INITIAL) for kind in values]
    for oracle in evidence.oracle:
        kinds += [(kind, oracle.step) for kind in ("gradients", *values)]
    for kind, step in kinds:
        for name in observed.names(kind, step) - observed.specs.keys():
            yield _whole(step, name, f"{name} is not a parameter of the model")
        for position, name in enumerate(observed.specs):
            problem = observed.coverage_problem(kind, step, name)
            yield _whole(step, name, problem and f"{kind}: {problem}", position)
    for oracle in evidence.oracle:
        yield from _samples(evidence, oracle.step)
        yield from _layers(evidence, oracle.step)


def _whole(step: int, subject: str, problem: str, position: int = 0) -> Check:
    return Check(
        step=step,
        subject=subject,
        error=1.0 if problem else 0.0,
        allowed=0.0,
        detail=problem,
        position=position,
    )


def dp_rank_of(plan: Plan, rank: int) -> int:
    """Return which share of the samples `rank` reads: dp_replicate major, dp_shard minor."""
    here = plan.mesh.coordinates(rank)
    return here[Axis.DP_REPLICATE] * plan.mesh.dp_shard + here[Axis.DP_SHARD]


def _samples(evidence: Evidence, step: int) -> Iterator[Check]:
    plan = evidence.plan
    batch = global_batch(plan, step)
    share = len(batch.sample_ids) // plan.mesh.dp
    for rank, report in enumerate(evidence.observed.reports(step)):
        dp_rank = dp_rank_of(plan, rank)
        wanted = batch.sample_ids[dp_rank * share : (dp_rank + 1) * share]
        problem = ""
        if sorted(report.samples) != sorted(wanted):
            others = [
                f"dp {other}"
                for other in range(plan.mesh.dp)
                if set(report.samples) & set(batch.sample_ids[other * share : (other + 1) * share])
            ]
            whose = " and ".join(others) or "no replica"
            problem = f"rank {rank} is dp {dp_rank} but read the samples of {whose}"
        yield _whole(step, f"samples of rank {rank}", problem, position=rank - 1000)


def _layers(evidence: Evidence, step: int) -> Iterator[Check]:
    """Compare the blocks that the ranks of each pipeline ran with those of the model.

    One rank runs a block, or two where microbatches cross the pipeline both ways.
    """
    plan = evidence.plan
    placement = placement_of(plan)
    copies = {
        block: len(placement.owners_of(stage))
        for stage, blocks in enumerate(plan.layout.pipeline.stages)
        for block in blocks
    }
    reports = evidence.observed.reports(step)
    for position, ranks in enumerate(plan.mesh.groups(Axis.PP)):
        ran = Counter(block for rank in ranks for block in set(reports[rank].layers))
        wrong = [block for block, owners in copies.items() if ran[block] != owners]
        problem = ""
        if wrong:
            must = copies[wrong[0]]
            times = f"{ran[wrong[0]]} of ranks {list(ranks)} ran block {wrong[0]}; {must} must"
            problem = (
                times if ran[wrong[0]] else f"none of ranks {list(ranks)} ran block {wrong[0]}"
            )
        subject = f"layers.{wrong[0]}" if wrong else f"blocks of ranks {list(ranks)}"
        yield _whole(step, subject, problem, position=position - 500)


def token_count(evidence: Evidence) -> Iterator[Check]:
    """Compare the valid tokens that each rank counted with those of the global batch."""
    for oracle in evidence.oracle:
        for rank, report in enumerate(evidence.observed.reports(oracle.step)):
            yield Check(
                step=oracle.step,
                subject=f"tokens of rank {rank}",
                error=abs(report.tokens - oracle.tokens) / oracle.tokens,
                allowed=0.0,
                detail=f"{report.tokens} instead of {oracle.tokens}",
            )


def microbatch_losses(evidence: Evidence) -> Iterator[Check]:
    """Compare the loss sum and the valid tokens of each microbatch of each replica."""
    for oracle in evidence.oracle:
        said = evidence.observed.microbatch_losses(oracle.step)
        for position, (slot, (total, count)) in enumerate(oracle.microbatch_losses.items()):
            values = said.get(slot, [])
            errors = [abs(value - total) / total for value, _ in values]
            wrong_count = [n for _, n in values if n != count]
            detail = f"{values[0][0]:.10g} instead of {total:.10g}" if values else "nobody has it"
            if wrong_count:
                detail = f"{wrong_count[0]} valid tokens instead of {count}"
            yield Check(
                step=oracle.step,
                subject=f"loss of dp {slot[0]} microbatch {slot[1]}",
                error=math.inf if wrong_count or not values else max(errors, key=_nan_last),
                allowed=evidence.tolerance.allowed("losses", oracle.step, str(slot)),
                detail=detail,
                position=position,
            )


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error


def scalar(kind: str, said: str) -> Callable[[Evidence], Iterator[Check]]:
    """Return the checks of one number, attribute `said` of each report, told as `kind`."""

    def checks(evidence: Evidence) -> Iterator[Check]:
        for oracle in evidence.oracle:
            wanted = getattr(oracle, said)
            for rank, report in enumerate(evidence.observed.reports(oracle.step)):
                value = getattr(report, said)
                # A step whose gradients overflow has no norm, on one device or on many.
                none = not math.isfinite(wanted) and not math.isfinite(value)
                yield Check(
                    step=oracle.step,
                    subject=f"{kind} of rank {rank}",
                    error=0.0 if none else abs(value - wanted) / wanted,
                    allowed=evidence.tolerance.allowed(said, oracle.step, ""),
                    detail=f"{value:.10g} instead of {wanted:.10g}",
                    position=rank,
                )

    return checks
