# SPDX-License-Identifier: Apache-2.0
"""Dropout done wrong on one device: masks that depend on the layout, or on too little.

What is dropped is a function of the seed, the step, the place in the model and the token. A mask
that is keyed by where a row lies on its rank is the same on ranks that must differ.

Shape suffixes: see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.mistakes.forward import Variant

ChangeBatch = Callable[[TokenBatch], TokenBatch]
"""From what a mask is keyed by to what it is keyed by instead."""


class WrongDropout(Operations):
    """Drop by another batch, or by another place in the model, or not at all."""

    def __init__(self, batch: ChangeBatch, *, site: str = "", factor: float = 1.0) -> None:
        """Key masks by `batch` of a batch and by `site` (if any); drop `factor` x as often."""
        self.batch, self.site, self.factor = batch, site, factor

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with other elements dropped."""
        by = self.batch(batch)
        return super().dropout(x_ND, probability * self.factor, self.site or site, by)


def dropout_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes in what is dropped, the most likely first."""
    if not plan.model.dropout:
        return
    size, share = plan.layout.microbatch_sequences, plan.num_microbatches
    rows = torch.arange(plan.mathematics.global_sequences)

    def variant(says: str, axis: str, operations: Operations) -> Variant:
        finding = ProofFinding("dropout", says, axis, tensor="embedding.weight")
        return Variant(finding, operations)

    def keyed(ids_B: torch.Tensor) -> WrongDropout:
        return WrongDropout(lambda batch: replace(batch, sample_ids_B=ids_B))

    axis = "dp" if plan.mesh.dp > 1 else "microbatches"
    says = "masks are keyed by the row in its microbatch: all ranks and microbatches share one"
    yield variant(says, axis, keyed(rows % size))
    if plan.mesh.dp > 1:
        says = "masks are keyed by the row on its replica: replicas share one"
        yield variant(says, "dp", keyed(rows % (size * share)))
    says = "masks are keyed by the row in the global batch, not by the sample"
    yield variant(says, "", keyed(rows))
    for says, wrong in (
        ("every step has the mask of step 0", WrongDropout(lambda batch: replace(batch, step=0))),
        ("nothing is dropped", WrongDropout(lambda batch: replace(batch, train=False))),
        ("every place in the model has one mask", WrongDropout(_same, site="embedding")),
        ("twice as much is dropped", WrongDropout(_same, factor=2.0)),
    ):
        yield variant(says, "", wrong)


def _same(batch: TokenBatch) -> TokenBatch:
    return batch
