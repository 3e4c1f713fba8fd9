"""What ranks run of norms over the width of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from echelon.core.event import Event
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.launch.context import RankContext
from echelon.parallel.kernels.width_norm import WidthNorm, WidthShare, inverse_rms
from echelon.parallel.storage.gradients import GradientStore, Reduction
from tests.parallel.buckets import by_hand
from tests.parallel.targets import tensor_group

EPS = 1e-3


def norm_parts(
    context: RankContext, argument: tuple[Sequence[torch.Tensor], ...]
) -> tuple[list[tuple[torch.Tensor, ...]], list[Event]]:
    """Norm this rank's part of each tensor; return y, dx and dw of each, and what was sent.

    `argument` are whole tensors, their weights, and the gradients of their outputs.
    """
    group, events = tensor_group(context)
    store = GradientStore(Reduction())
    parts = [
        [one.chunk(group.size, dim=-1)[group.index].clone() for one in tensors]
        for tensors in argument
    ]
    weights = {str(n): nn.Parameter(one) for n, one in enumerate(parts[1])}
    store.hold(by_hand(weights, [[*weights]], gradients=torch.float64))
    store.start_step()
    store.start_backward(last=True)
    share = WidthShare(group=group, store=store, pieces=PROOF_PIECES)
    inputs = [one.requires_grad_() for one in parts[0]]
    inverses = inverse_rms(inputs, EPS, group, PROOF_PIECES)
    found: list[tuple[torch.Tensor, ...]] = []
    for place, (x, inverse, dy) in enumerate(zip(inputs, inverses, parts[2], strict=True)):
        y = cast(torch.Tensor, WidthNorm.apply(x, weights[str(place)], inverse, share))
        y.backward(dy)
        assert x.grad is not None
        found.append((y.detach(), x.grad, store.buckets[0].slots[place].gradient.clone()))
    return found, list(events.events)
