"""Modules with parts that a cut may get wrong: unused, shared or frozen ones, buffers, branches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.module.composed.composed_targets import Composed, Placed
from tests.parallel.module.tensor.families import WIDTH, OwnBlock


class Counted(OwnBlock):
    """A block that counts its forwards, or keeps a running mean of its stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(WIDTH if kind == "mean" else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream; change the buffer."""
        if torch.is_grad_enabled() or self.kind == "mean":
            new = x.detach().mean((0, 1)) if self.kind == "mean" else torch.ones_like(self.seen)
            self.seen += 0.5 * (new - self.seen) if self.kind == "mean" else new
        y = super().forward(x)
        return y * 1.01 if self.kind == "branch" and dist_rank() == 1 else y


def dist_rank() -> int:
    """Return this rank, 0 in one process."""
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Composed):
    """A module with a part of some kind."""

    part: str

    def make(self) -> nn.Module:
        """Return the module."""
        model = Composed.make(self)
        assert isinstance(model, Placed)
        if self.part == "unused":
            model.extra = nn.Linear(3, 3).double()
        if self.part == "tied":
            model.head.weight = model.tokens.weight
        if self.part == "shared":
            model.blocks[1].up = model.blocks[0].up
        if self.part in ("count", "mean", "branch"):
            block = Counted(self.part).double()
            block.load_state_dict(model.blocks[1].state_dict(), strict=False)
            model.blocks[1] = block
        return model
