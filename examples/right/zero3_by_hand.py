"""ZeRO stage 3 by hand: each layer gathers its weights for its pass, and scatters their gradients.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE`.
Each rank holds a slice of the rows of every matrix and of every vector.
"""

from typing import Any

import torch
import torch.distributed as dist
from ddp import CLIP_NORM, IGNORED, MESH, batch, model_of, one_device, summed_loss
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import echelon as ec

__all__ = ["one_device"]


class Gather(torch.autograd.Function):
    """A whole weight of the slices of all ranks; its gradient is scattered as a mean."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor) -> torch.Tensor:
        """Gather the slices."""
        whole = piece.new_empty(len(piece) * dist.get_world_size(), *piece.shape[1:])
        dist.all_gather_into_tensor(whole, piece.detach())
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all ranks, and keep this rank's slice."""
        whole = grads[0].contiguous()
        piece = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(piece, whole)
        return piece / dist.get_world_size()


class Sharded(nn.Module):
    """A layer whose weights are whole only while it computes; backward gathers them again."""

    def __init__(self, layer: nn.Module) -> None:
        """Take this rank's slices."""
        super().__init__()
        self.layer = [layer.to("meta")]  # in a list: its own weights are no weights of the model
        self.names = [name for name, _ in layer.named_parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with gathered weights, and forget them."""
        return checkpoint(self._gathered, x, *self.parameters(), use_reentrant=False)

    def _gathered(self, x: torch.Tensor, *pieces: torch.Tensor) -> torch.Tensor:
        whole = {n: Gather.apply(piece) for n, piece in zip(self.names, pieces, strict=True)}
        return functional_call(self.layer[0], whole, (x,))


def sharded(layer: nn.Module) -> Sharded:
    """Return a layer with this rank's slices as its only parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = {n: p.detach().chunk(world)[rank].clone() for n, p in layer.named_parameters()}
    module = Sharded(layer)
    for name, piece in pieces.items():
        module.register_parameter(name.replace(".", "_"), nn.Parameter(piece))
    return module


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train the rows of this replica with the slices of this rank."""
    whole = model_of(case)
    names = {
        f"{index}.{name.replace('.', '_')}": ec.Logical(name=f"{index}.{name}", axis="dp")
        for index, layer in enumerate(whole)
        for name, _ in layer.named_parameters()
    }
    model = nn.Sequential(*(sharded(layer) for layer in whole))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        labels = (labels_BT != IGNORED).sum()
        dist.all_reduce(labels)
        loss = summed_loss(model(inputs_BT), labels_BT) * MESH["dp"] / labels
        loss.backward()
        square = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": square.sqrt()}

    return ec.OnRank(model=model, step=step, optimizer=optimizer, names=names)
