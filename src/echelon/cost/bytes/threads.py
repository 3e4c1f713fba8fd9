# SPDX-License-Identifier: Apache-2.0
"""Bytes that go through the primary replica in a step, and what the others hold beside it.

`N` replicas, `G` the elements of all buckets of the model (padding included), `M` microbatches of
`b` sequences of `T` tokens; `s` the bytes of an element as it travels.

    replicate   once a step      (N-1) G s    parameters to every other replica
    scatter     M times          (N-1)/N (16 b T + 8 b)    tokens, labels and ids of sequences
    gather      M times          (N-1) s      the loss of each replica
    seeds       M times          (N-1) s      the derivative of the loss, back to each replica
    gradients   once a step      (N-1) G s    onto the primary, where they are summed

All of it goes through the primary, where ranks of a ring send 2 (N-1)/N G s each. What is gathered
is the loss, for the model ends in it: a module that ends in logits has those gathered in its place.

Of a module of your own (`ThreadedStep`), in whose passes A <= N replicas have rows, the primary the
share q of them: (N-1)/N of what is cut is then (1-q), and nothing needs to be even.

    replicate        once a step      (A-1) (P + U)           parameters and buffers
    scatter          each pass        (1-q) X + (A-1) W       what is cut, and what all get whole
    gather           each pass        (1-q) Y + (A-1) Z       outputs by rows, and one of each
    seeds            each backward    (1-q) Y + (A-1) Z       derivatives of those that have one
    gradients        each backward    (A-1) D                 onto the primary
    input gradients  each backward    (1-q) X + (A-1) W       of inputs that have one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.core.choices.threads import THREADS_AXIS, replica_rows
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.terms import WIDE_BYTES, HeldTerm, SentTerm
from echelon.layout.buckets import BucketPlan

ID_BYTES = 8
"""A token, a label, or the id of a sequence: one int64."""

REPLICA_PARAMETERS, REPLICA_GRADIENTS = "parameters of replicas", "gradients of replicas"
"""Names of the terms of what other replicas hold in the memory of the primary."""

_SOURCE = "PyTorch, torch.nn.DataParallel; Li et al., PyTorch Distributed, 2020, section 2.2"


def thread_bytes(plan: Plan, buckets: Sequence[BucketPlan]) -> tuple[SentTerm, ...]:
    """Return the terms of what goes through the primary; none without other replicas."""
    replicas = plan.layout.threads.replicas
    if replicas == 1:
        return ()
    others, precision = replicas - 1, plan.mathematics.precision
    elements = sum(bucket.num_elements for bucket in buckets)
    loss = max(WIDE_BYTES, DTYPE_BYTES[precision.parameters])

    def term(name: str, count: int, each: int, formula: str) -> SentTerm:
        return SentTerm(
            axis=THREADS_AXIS, name=name, count=count, each=each, formula=formula, source=_SOURCE
        )

    times = plan.num_microbatches
    return (
        term("replicate", 1, others * elements * DTYPE_BYTES[precision.parameters], "(N-1) G s"),
        term(
            "scatter",
            times,
            others * scattered_bytes(plan),
            "(N-1)/N x (tokens, labels, ids of sequences) x 8",
        ),
        term("gather", times, others * loss, "(N-1) x the loss"),
        term("seeds", times, others * loss, "(N-1) x the loss"),
        term("gradients", 1, others * elements * DTYPE_BYTES[precision.gradients], "(N-1) G s"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRows:
    """Hold bytes of tensors, all replicas together where they are cut, else of one replica."""

    cut: int = 0
    each: int = 0

    def elsewhere(self, rows: Sequence[int]) -> int:
        """Return the bytes that are not the primary's, of replicas with so many rows."""
        share = self.cut * sum(rows[1:]) // sum(rows) if sum(rows) else 0
        return share + (len(rows) - 1) * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedPass:
    """Hold what one forward pass of a module is given and gives, and a backward pass of it."""

    rows: int
    inputs: ByRows
    outputs: ByRows
    seeds: ByRows = field(default_factory=ByRows)
    gradients: int = 0
    input_gradients: ByRows = field(default_factory=ByRows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedStep:
    """Hold a step of a module of your own on threads, between two changes of its parameters."""

    replicas: int
    state: int
    """Bytes of parameters and buffers, each counted once: P + U."""
    passes: Sequence[ThreadedPass]


def step_bytes(step: ThreadedStep) -> tuple[SentTerm, ...]:
    """Return the terms of what goes through the primary in a step of a module of your own."""
    rows = [replica_rows(one.rows, step.replicas) for one in step.passes]
    others = [len(one) - 1 for one in rows]
    pairs = list(zip(step.passes, rows, strict=True))

    def term(name: str, sent: int, formula: str) -> SentTerm:
        return SentTerm(axis=THREADS_AXIS, name=name, each=sent, formula=formula, source=_SOURCE)

    return (
        term("replicate", max(others, default=0) * step.state, "(A-1) (P + U)"),
        term("scatter", sum(p.inputs.elsewhere(n) for p, n in pairs), "(1-q) X + (A-1) W"),
        term("gather", sum(p.outputs.elsewhere(n) for p, n in pairs), "(1-q) Y + (A-1) Z"),
        term("seeds", sum(p.seeds.elsewhere(n) for p, n in pairs), "(1-q) Y + (A-1) Z"),
        term(
            "gradients",
            sum(p.gradients * n for p, n in zip(step.passes, others, strict=True)),
            "(A-1) D",
        ),
        term(
            "input gradients",
            sum(p.input_gradients.elsewhere(n) for p, n in pairs),
            "(1-q) X + (A-1) W",
        ),
    )


def scattered_bytes(plan: Plan) -> int:
    """Return the bytes of a replica's part of a microbatch."""
    sequences = plan.layout.microbatch_sequences // plan.layout.threads.replicas
    return sequences * ID_BYTES * (2 * plan.mathematics.sequence_length + 1)


def replica_terms(plan: Plan, buckets: Sequence[BucketPlan]) -> tuple[HeldTerm, ...]:
    """Return what other replicas hold in the memory of the primary: nothing where each has a GPU.

    Their parameters and gradients stay between steps, as buckets that are written again.
    """
    others, precision = plan.layout.threads.replicas - 1, plan.mathematics.precision
    if not others or plan.cluster.backend == "nccl":
        return ()
    elements = sum(bucket.num_elements for bucket in buckets)
    kinds = {
        REPLICA_PARAMETERS: DTYPE_BYTES[precision.parameters],
        REPLICA_GRADIENTS: DTYPE_BYTES[precision.gradients],
    }
    return tuple(
        HeldTerm(
            name=name, bytes=others * elements * size, formula=f"{others} x {elements:,} x {size}"
        )
        for name, size in kinds.items()
    )
