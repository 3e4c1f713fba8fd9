# SPDX-License-Identifier: Apache-2.0
"""The comparisons behind each claim: one oracle value beside what the ranks said of it.

Errors are relative and norm-wise: ``|observed - oracle| / max(|oracle|, floor)``, per tensor, the
largest over all ranks that hold a part of it. The floor is 1e-4 of the norm of all tensors of that
kind together: some gradients are zero by mathematics (a key bias shifts all scores of a softmax
alike), and what is left of them is the rounding of larger numbers.

Of what passes between the parts of the model every rank tells the rows that it has: some positions
where a sequence is split, its microbatches, its blocks. Together they are whole [B, T, W] tensors;
a token that several ranks have is compared on each, and so is one that is computed again.

Shape suffixes: B sequences of the global batch, T positions, n tokens of a rank, W numbers of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import product

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.evidence.run import INITIAL, HeldPart, ProgramRun
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import global_norm
from echelon.proof.oracle.oracle import Activations, initial_parameters
from echelon.schedule.from_plan import stage_placement_from_plan


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
    run: ProgramRun[HeldPart], kind: str, step: int, name: str, right: torch.Tensor
) -> float:
    """Return the error of the part of a tensor that is furthest off, or of all of them together."""
    parts = run.parts(kind, step, name)
    if not parts or not all(run.fits(part) for part in parts):
        return math.inf
    errors = [float((part.tensor.double() - part.of(right).double()).norm()) for part in parts]
    whole = float((run.whole(kind, step, name) - right.double()).norm())
    return max((*errors, whole), key=_nan_last)


def initial_weights(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the first weights of every rank with those of the seed, bit for bit."""
    observed, right = evidence.run, initial_parameters(evidence.plan)
    for kind, (position, (name, oracle)) in product(observed.value_kinds, enumerate(right.items())):
        pieces = [p for p in observed.parts(kind, INITIAL, name) if observed.fits(p)]
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


def nothing_dropped(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare what the ranks hold, read and ran with the model and the batch."""
    observed = evidence.run
    kinds = [(kind, INITIAL) for kind in observed.value_kinds]
    for oracle in evidence.steps:
        kinds += [(kind, oracle.step) for kind in ("gradients", *observed.value_kinds)]
    for kind, step in kinds:
        for name in observed.names(kind, step) - observed.specs.keys():
            yield exact_check(step, name, f"{name} is not a parameter of the model")
        for position, (name, spec) in enumerate(observed.specs.items()):
            if kind == "gradients" and spec.frozen:
                continue
            problem = observed.coverage_problem(kind, step, name)
            yield exact_check(step, name, problem and f"{kind}: {problem}", position)
    for oracle in evidence.steps:
        yield from _samples(evidence, oracle.step)
        yield from _layers(evidence, oracle.step)


def exact_check(step: int, subject: str, problem: str, position: int = 0) -> Check:
    """Return the check of something that is as it must be, or has a problem."""
    return Check(step, subject, float(bool(problem)), detail=problem, position=position)


def dp_rank_of(plan: Plan, rank: int) -> int:
    """Return which share of the samples `rank` reads: dp_replicate major, dp_shard minor."""
    here = plan.mesh.coordinates(rank)
    return here[Axis.DP_REPLICATE] * plan.mesh.dp_shard + here[Axis.DP_SHARD]


def _samples(evidence: PlanEvidence, step: int) -> Iterator[Check]:
    plan, every = evidence.plan, global_batch(evidence.plan, step).sample_ids
    share = len(every) // plan.mesh.dp
    ids = [every[replica * share : (replica + 1) * share] for replica in range(plan.mesh.dp)]
    for rank, report in enumerate(evidence.run.reports(step)):
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


def _layers(evidence: PlanEvidence, step: int) -> Iterator[Check]:
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
    reports = evidence.run.reports(step)
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


def token_count(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the valid tokens that each rank counted with those of the global batch."""
    for oracle, rank, report in evidence.reports():
        error = abs(report.tokens - oracle.tokens) / oracle.tokens
        detail = f"{report.tokens} instead of {oracle.tokens}"
        yield Check(oracle.step, f"tokens of rank {rank}", error, detail=detail)


def microbatch_losses(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the loss sum and the valid tokens of each microbatch of each replica."""
    for oracle in evidence.steps:
        reported = evidence.run.microbatch_losses(oracle.step)
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


def losses(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the loss of the global batch that each rank tells."""
    for oracle, rank, report in evidence.reports():
        yield Check(
            oracle.step,
            f"loss of rank {rank}",
            abs(report.loss - oracle.loss) / oracle.loss,
            allowed=evidence.tolerance.allowed("loss", oracle.step, ""),
            detail=f"{report.loss:.10g} instead of {oracle.loss:.10g}",
            position=rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCopy:
    """Hold the rows that one rank has of a boundary; `place_n` says where in B * T each is."""

    rank: int
    recomputed: bool
    place_n: torch.Tensor
    values_nW: torch.Tensor

    def right_rows(self, whole_BTW: torch.Tensor) -> torch.Tensor:
        """Return the same rows of a whole tensor."""
        return whole_BTW.flatten(0, 1)[self.place_n]


Copies = Mapping[str, list[ActivationCopy]]
"""What all ranks have of each boundary."""


def copies_at(plan: Plan, observed: ObservedRun, step: int, *, gradient: bool = False) -> Copies:
    """Return what ranks told of the boundaries in a step."""
    length = plan.mathematics.sequence_length
    samples = torch.tensor(global_batch(plan, step).sample_ids)
    in_order, row_of = samples.sort()
    found: dict[str, list[ActivationCopy]] = {}
    for one in observed.activations:
        if (one.step, one.gradient) != (step, gradient):
            continue
        sample_n, position_n = one.tokens_n // length, one.tokens_n % length
        at_n = torch.searchsorted(in_order, sample_n).clamp(max=len(samples) - 1)
        known_n = in_order[at_n] == sample_n
        found.setdefault(one.name, []).append(
            ActivationCopy(
                rank=one.rank,
                recomputed=one.recomputed,
                place_n=(row_of[at_n] * length + position_n)[known_n],
                values_nW=one.values_nW[known_n].double(),
            )
        )
    return found


def whole_activation(copies: list[ActivationCopy], like_BTW: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the ranks have together in the forward pass; NaN where none has it."""
    whole_BTW = torch.full(like_BTW.shape, torch.nan, dtype=torch.float64)
    for copy in reversed(copies):
        if not copy.recomputed and copy.values_nW.shape[-1] == whole_BTW.shape[-1]:
            whole_BTW.view(-1, whole_BTW.shape[-1])[copy.place_n] = copy.values_nW
    return whole_BTW


def activations(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare what passed each boundary in each forward pass."""
    for oracle in evidence.steps:
        yield from _checks(evidence, "activations", oracle.step, oracle.activations)


def activation_gradients(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the gradient of the mean loss at each boundary, the last one first."""
    for oracle in evidence.steps:
        if not oracle.skipped:
            of = oracle.activation_gradients
            yield from _checks(evidence, "activation gradients", oracle.step, of)


def _checks(evidence: PlanEvidence, kind: str, step: int, right: Activations) -> Iterator[Check]:
    copies = copies_at(evidence.plan, evidence.run, step, gradient=kind != "activations")
    floor = FLOOR * global_norm(right)
    for position, (name, right_BTW) in enumerate(right.items() if copies else ()):
        error, detail = copies_error(copies.get(name, []), right_BTW.double())
        scale = max(float(right_BTW.double().norm()), floor)
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed(kind, step, name),
            detail=detail,
            position=position,
        )


def copies_error(copies: list[ActivationCopy], right_BTW: torch.Tensor) -> tuple[float, str]:
    """Return the error of the copy that is furthest off, and who has it."""
    told_N = torch.zeros(right_BTW[..., 0].numel(), dtype=torch.bool)
    worst, detail = 0.0, ""
    for copy in copies:
        if copy.values_nW.shape[-1] != right_BTW.shape[-1]:
            return math.inf, f"rank {copy.rank} has {copy.values_nW.shape[-1]} numbers of a token"
        told_N[copy.place_n] |= not copy.recomputed
        error = float((copy.values_nW - copy.right_rows(right_BTW)).norm())
        if not error <= worst:
            again = ", recomputed in backward" if copy.recomputed else ""
            worst, detail = (math.inf if math.isnan(error) else error), f"rank {copy.rank}{again}"
    missing = int((~told_N).sum())
    if missing:
        return math.inf, f"{missing} of {len(told_N)} tokens are told by no rank"
    return worst, detail
