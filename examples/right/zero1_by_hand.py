"""ZeRO stage 1 by hand: the optimizer reduces, clips and gathers inside its step.

A template: replace model, batch and optimizer by your own, then `echelon prove --subject FILE`.
No hook sees the reduced gradients. The prover judges each by its update.
"""

import torch
import torch.distributed as dist
from ddp import CLIP_NORM, IGNORED, MESH, batch, model_of, one_device, summed_loss
from torch import nn

import echelon as ec

__all__ = ["one_device"]


class ZeroOne(torch.optim.Optimizer):
    """AdamW over one slice of all parameters, laid out as one flat vector."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        """Take this rank's slice; the vector is padded to equal slices."""
        super().__init__(model.parameters(), {"lr": lr})
        self.parameters = list(model.parameters())
        world = dist.get_world_size()
        flat = self.flat([p.detach() for p in self.parameters])
        self.slice = nn.Parameter(flat.chunk(world)[dist.get_rank()].clone())
        self.inner = torch.optim.AdamW([self.slice], lr=lr)
        self.norm = torch.zeros(())

    def flat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return tensors as one vector, zeros behind."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sum gradients over the replicas, clip, update this slice, gather all slices."""
        flat = self.flat([p.grad for p in self.parameters if p.grad is not None])
        dist.all_reduce(flat)
        own = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
        square = own.square().sum()
        dist.all_reduce(square)
        self.norm = square.sqrt()
        self.slice.grad = own * (CLIP_NORM / (self.norm + 1e-6)).clamp(max=1.0)
        self.inner.step()
        dist.all_gather(list(flat.chunk(dist.get_world_size())), self.slice.detach())
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.copy_(flat[start:end].view_as(parameter))
            start = end


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this replica: its own gradients, of its share of the loss over all labels."""
    model = model_of(case)
    optimizer = ZeroOne(model, lr=1e-3)

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        labels = (labels_BT != IGNORED).sum()
        dist.all_reduce(labels)
        loss = summed_loss(model(inputs_BT), labels_BT) / labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss * MESH["dp"], "grad_norm": optimizer.norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
