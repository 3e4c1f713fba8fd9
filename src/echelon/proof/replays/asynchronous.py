# SPDX-License-Identifier: Apache-2.0
"""What must hold of an asynchronous run: nothing lost or applied twice, the bound, the replay.

Where something is wrong, replays in which a mistake is made say which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.choices.updates import AppliedGradient
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import servers as server_rules
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import global_norm
from echelon.proof.replays.asynchronous_replay import Mistake, OrderProblem, Replay
from echelon.proof.replays.records import EXPLAINED, REPLAY_TOLERANCE, AsynchronousRank


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousEvidence:
    """Hold what the ranks of a plan said of so many steps, and what a replay gives."""

    plan: Plan
    num_steps: int
    ranks: Sequence[AsynchronousRank]
    final: Sequence[Mapping[str, torch.Tensor]]
    """Parameters of each server by the replay; empty where the order cannot be."""
    losses: Mapping[tuple[int, int], float]
    """Loss sums of each worker and step by the replay."""

    @property
    def servers(self) -> list[AsynchronousRank]:
        """Return what servers said."""
        return [self.ranks[rank] for rank in self.plan.mesh.server_ranks]


def judge_asynchronous(evidence: AsynchronousEvidence) -> tuple[ClaimResult, ...]:
    """Return how every claim fares, in the order in which one causes the next."""
    claims = (
        (
            rules.PROVE_NOTHING_DROPPED,
            "nothing dropped: elements of parameters, samples of every step",
            _nothing_dropped,
        ),
        (
            server_rules.PROVE_APPLIED_ONCE,
            "each server applies each worker's gradient of each step once, in one order",
            _applied_once,
        ),
        (
            server_rules.PROVE_STALENESS_BOUND,
            "no worker is further ahead of the slowest than the bound says",
            _bound,
        ),
        (
            server_rules.PROVE_REPLAYED_LOSS,
            "the loss of each step of each worker, from the versions that it had read",
            _losses,
        ),
        (
            server_rules.PROVE_REPLAY,
            "a replay of the recorded order in one process gives the same parameters",
            _parameters,
        ),
        (
            rules.PROVE_BYTES_SENT,
            "bytes sent in all steps are those of the formulas",
            _bytes_sent,
        ),
        (
            rules.PROVE_BYTES_HELD,
            "bytes held on each rank are those of the formulas",
            _bytes_held,
        ),
    )
    return tuple(judged(rule, says, list(checks(evidence))) for rule, says, checks in claims)


def _nothing_dropped(evidence: AsynchronousEvidence) -> Iterator[Check]:
    plan = evidence.plan
    for spec in parameters(plan.model):
        holders = torch.zeros(spec.shape, dtype=torch.int64)
        for said in evidence.servers:
            for piece in (one for one in said.pieces if one.name == spec.name):
                holders[piece.region] += 1
        wrong = int((holders != 1).sum())
        problem = f"{wrong} of {holders.numel()} elements are not on one server" if wrong else ""
        yield exact_check(0, spec.name, problem)
    for step in range(evidence.num_steps):
        every = global_batch(plan, step).sample_ids
        share = len(every) // plan.mesh.dp
        for rank, said in enumerate(evidence.ranks):
            right = list(every[rank * share : (rank + 1) * share])
            problem = "" if sorted(said.samples.get(step, ())) == sorted(right) else "other samples"
            yield exact_check(step, f"samples of rank {rank}", problem, rank)


def _applied_once(evidence: AsynchronousEvidence) -> Iterator[Check]:
    plan = evidence.plan
    for server, said in enumerate(evidence.servers):
        times = Counter((one.worker, one.step) for one in said.applied)
        for worker in range(plan.mesh.num_workers):
            for step in range(evidence.num_steps):
                count = times.pop((worker, step), 0)
                problem = "" if count == 1 else f"applied {count} times instead of 1"
                subject = f"gradient of worker {worker} on server {server}"
                yield exact_check(step, subject, problem, server)
        beyond = f"{len(times)} gradients of steps that were not taken" if times else ""
        yield exact_check(0, f"order of server {server}", beyond, server)
        versions = sorted({one.version for one in said.applied})
        gap = "" if versions == list(range(len(versions))) else "versions are left out"
        yield exact_check(0, f"versions of server {server}", gap, server)


def _bound(evidence: AsynchronousEvidence) -> Iterator[Check]:
    """Compare how far each worker was ahead when it began a step with the bound."""
    updates, workers = evidence.plan.mathematics.updates, evidence.plan.mesh.num_workers
    for server, said in enumerate(evidence.servers):
        for one in said.applied:
            subject = f"step {one.step} of worker {one.worker} on server {server}"
            ahead = one.step - slowest(said.applied, one.read, workers)
            problem = ""
            if one.read > one.version:
                problem = f"read version {one.read}, which came after {one.version}"
            elif ahead > updates.max_staleness:
                problem = f"{ahead} steps ahead of the slowest, allowed {updates.max_staleness}"
            elif one.version - one.read > updates.most_stale(workers):
                problem = f"staleness {one.version - one.read}"
            yield exact_check(one.step, subject, problem, server)


def slowest(applied: Sequence[AppliedGradient], version: int, workers: int) -> int:
    """Return the steps that the slowest worker has done in the updates before a version."""
    done = Counter(one.worker for one in applied if one.version < version)
    return min(done[worker] for worker in range(workers))


def _losses(evidence: AsynchronousEvidence) -> Iterator[Check]:
    for (worker, step), right in sorted(evidence.losses.items(), key=lambda one: one[0][::-1]):
        seen = evidence.ranks[worker].losses.get(step, float("nan"))
        yield Check(
            step,
            f"loss of worker {worker}",
            abs(seen - right) / abs(right),
            allowed=REPLAY_TOLERANCE,
            detail=f"{seen:.12g} instead of {right:.12g}",
            position=worker,
        )


def _parameters(evidence: AsynchronousEvidence) -> Iterator[Check]:
    last = evidence.num_steps - 1
    if not evidence.final:
        yield exact_check(last, "the order", "a gradient was read from a version after it")
    for server, right in enumerate(evidence.final):
        for name, error in errors_of(evidence.servers[server], right).items():
            yield Check(
                last,
                f"{name} on server {server}",
                error,
                allowed=REPLAY_TOLERANCE,
                position=server,
            )


def errors_of(said: AsynchronousRank, right: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest relative error of the pieces of each parameter on a server.

    A bias without effect, such as a key bias without rotary positions, moves by rounding alone.
    """
    floor = max(FLOOR * global_norm(right), 1e-30)
    found: dict[str, float] = {}
    for piece in said.pieces:
        wanted = right[piece.name][piece.region]
        scale = max(float(right[piece.name].norm()), floor)
        error = float((piece.values.double() - wanted).norm()) / scale
        found[piece.name] = max(found.get(piece.name, 0.0), error)
    return found


def _bytes_sent(evidence: AsynchronousEvidence) -> Iterator[Check]:
    for rank, said in enumerate(evidence.ranks):
        each = bytes_sent_by_axis(evidence.plan, rank)
        for axis in sorted({*each, *said.sent}):
            wanted, found = evidence.num_steps * each.get(axis, 0), said.sent.get(axis, 0)
            problem = "" if found == wanted else f"{found} sent, {wanted} by the formulas"
            yield exact_check(0, f"bytes of rank {rank} over {axis}", problem, rank)


def _bytes_held(evidence: AsynchronousEvidence) -> Iterator[Check]:
    for rank, said in enumerate(evidence.ranks):
        wanted = {term.name: term.bytes for term in bytes_held(evidence.plan, rank)}
        for name in sorted({*wanted, *said.held}):
            a, b = said.held.get(name, 0), wanted.get(name, 0)
            problem = "" if a == b else f"{a} bytes held, {b} by the formulas"
            yield exact_check(0, f"{name} of rank {rank}", problem, rank)


def evidence_of(
    plan: Plan, num_steps: int, ranks: Sequence[AsynchronousRank]
) -> AsynchronousEvidence:
    """Replay what the ranks recorded, and return both beside each other."""
    replay = Replay(plan=plan, ranks=ranks)
    try:
        final = replay.final()
    except OrderProblem:
        final = []
    return AsynchronousEvidence(
        plan=plan, num_steps=num_steps, ranks=ranks, final=final, losses=replay.losses
    )


def explaining(evidence: AsynchronousEvidence) -> Iterator[Mistake]:
    """Yield the mistakes whose replay gives what the servers have, where the right one does not."""
    if not evidence.final or _largest_error(evidence, evidence.final) < EXPLAINED:
        return
    for mistake in _mistakes(evidence.plan):
        final = Replay(plan=evidence.plan, ranks=evidence.ranks, mistake=mistake).final()
        if _largest_error(evidence, final) < EXPLAINED:
            yield mistake


def _largest_error(
    evidence: AsynchronousEvidence, final: Sequence[Mapping[str, torch.Tensor]]
) -> float:
    return max(
        error
        for said, right in zip(evidence.servers, final, strict=True)
        for error in errors_of(said, right).values()
    )


def _mistakes(plan: Plan) -> Iterator[Mistake]:
    workers, updates = plan.mesh.num_workers, plan.mathematics.updates
    twice = Mistake(name="twice", says="every update is made twice", repeats=2)
    yield twice
    for server in range(plan.mesh.servers):
        says = f"server {server} makes every update twice"
        yield replace(twice, server=server, says=says)
    says = "a stale version is applied as fresh: workers compute from the pull before the last"
    yield Mistake(name="stale", says=says, earlier=1)
    if updates.damping and updates.applies_each:
        says = "a stale gradient is applied as fresh: its rate is not damped"
        yield Mistake(name="undamped", says=says, undamped=True)
    for factor, name in ((1.0 / workers, "1/W"), (float(workers), "W")):
        says = f"gradients of workers are {name} times what they are"
        yield Mistake(name=name, says=says, factor=factor)
    if not updates.applies_each:
        says = "an unfair average: each gradient is averaged with the mean of those before it"
        yield Mistake(name="replicas weighted", says=says, weights=_running_mean)


def _running_mean(worker: int, workers: int) -> float:
    """Return W times the weight of a worker where each is averaged with the mean so far."""
    return workers * 0.5 ** (workers - max(worker, 1))
