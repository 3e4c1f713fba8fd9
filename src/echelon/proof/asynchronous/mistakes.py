# SPDX-License-Identifier: Apache-2.0
"""Replays in which something is done wrong: that which gives what the servers have is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.proof.asynchronous.claims import AsynchronousEvidence, errors_of
from echelon.proof.asynchronous.replay import Mistake, Replay
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.claims.claims import ClaimResult, first_failure

EXPLAINED = 1e-8
"""What a mistake may leave unexplained, relative: others leave far more."""


def diagnose_asynchronous(
    evidence: AsynchronousEvidence, results: Sequence[ClaimResult]
) -> Diagnosis | None:
    """Return what is wrong with a run, where something is."""
    failed = first_failure(results)
    if failed is None:
        return None
    result, failure = failed
    mistake = next(_explaining(evidence), None)
    says = failure.detail or f"off by {failure.error:.2g}, allowed {failure.allowed:.0e}"
    return Diagnosis(
        rule=result.rule.id,
        step=failure.step,
        tensor=failure.subject,
        where="",
        factor="none" if mistake is None else mistake.name,
        axis=SERVERS_AXIS,
        value=None,
        says=says if mistake is None else mistake.says,
        residual=failure.error,
        ranks=(),
        num_wrong=len(result.failures),
        num_compared=result.compared,
    )


def _explaining(evidence: AsynchronousEvidence) -> Iterator[Mistake]:
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
