"""Gradients of activations that went to the wrong microbatch on their way between stages.

What a stage adds up is then no sum of what microbatches give: each weight gradient has the input of
one microbatch and the output gradient of another. So the exchange is made on one device, for every
pair of microbatches at every boundary, and compared.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch

from echelon.core.plan import Plan
from echelon.prove.batches import global_batch
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import EXPLAINED, relative_residual
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.ranks import Piece
from echelon.prove.whole_loss import whole_loss

_MOST_MICROBATCHES = 8
"""Pairs are tried one by one; a proof that was shrunk has few."""


def swapped_messages(
    plan: Plan, reference: Plan, oracle: OracleStep, name: str, piece: Piece
) -> Iterator[Finding]:
    """Find two microbatches whose gradients changed places where they entered a stage."""
    if plan.mesh.pp == 1 or plan.num_microbatches > _MOST_MICROBATCHES:
        return
    for stage, layer in _ends(plan):
        for (one, other), gradient in _exchanged(reference, oracle, name, layer):
            residual = relative_residual(piece.tensor.double(), gradient[piece.region])
            if residual < EXPLAINED:
                says = (
                    f"the gradients that stage {stage + 1} gives to stage {stage} changed places: "
                    f"microbatch {one} got that of {other}, and {other} that of {one}"
                )
                yield Finding(factor="order", says=says, axis="pp", residual=residual)
                return


def _ends(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield each stage that another one follows, with the last block that has run by its end."""
    last = None
    for stage, blocks in enumerate(plan.layout.pipeline.stages[:-1]):
        last = blocks[-1] if blocks else last
        if last is not None:
            yield stage, last


def _exchanged(
    plan: Plan, oracle: OracleStep, name: str, layer: int
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield the gradient of `name` for each pair that changes places after block `layer`."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    kept: list[torch.Tensor] = []
    model.layers[str(layer)].register_forward_hook(lambda *found: kept.append(found[-1]))
    batch = global_batch(plan, oracle.step)
    loss = whole_loss(plan, model, oracle)
    (h_ND,) = kept
    parameter = model.get_parameter(name)
    (dh_ND,) = torch.autograd.grad(loss, h_ND, retain_graph=True)

    def from_above(dh: torch.Tensor) -> torch.Tensor | None:
        (found,) = torch.autograd.grad(h_ND, parameter, dh, retain_graph=True, allow_unused=True)
        return found

    right = from_above(dh_ND)
    if right is None:  # it is above the boundary
        return
    dh_TBD = dh_ND.view(-1, len(batch.sample_ids), dh_ND.shape[1])
    for one, other in combinations(range(plan.num_microbatches), 2):
        wrong = from_above(_swapped(plan, dh_TBD, one, other).reshape_as(dh_ND))
        assert wrong is not None
        yield (one, other), oracle.gradients[name] + (wrong - right)


def _swapped(plan: Plan, dh_TBD: torch.Tensor, one: int, other: int) -> torch.Tensor:
    """Return dh with the rows of two microbatches exchanged, on every replica."""
    swapped, size = dh_TBD.clone(), plan.layout.microbatch_sequences
    for replica in range(plan.mesh.dp):
        first = replica * plan.num_microbatches
        here, there = (
            slice((first + microbatch) * size, (first + microbatch + 1) * size)
            for microbatch in (one, other)
        )
        swapped[:, here], swapped[:, there] = dh_TBD[:, there], dh_TBD[:, here]
    return swapped
