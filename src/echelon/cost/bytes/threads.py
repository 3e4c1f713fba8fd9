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
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.terms import HeldTerm, SentTerm
from echelon.layout.buckets import BucketPlan

ID_BYTES = 8
"""A token, a label, or the id of a sequence: one int64."""

LEAST_LOSS_BYTES = 4
"""The loss is computed in at least fp32."""

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
    loss = max(LEAST_LOSS_BYTES, DTYPE_BYTES[precision.parameters])

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
