"""What ranks run in the tests of gathered, scattered and summed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.event import Event
from echelon.launch.context import RankContext
from echelon.parallel.transport import rows
from tests.parallel.targets import tensor_group

NAMES = ("GATHER_ROWS", "SCATTER_ROWS", "SUM_GRADIENT", "SUM_ROWS", "OWN_ROWS", "WHOLE_ROWS")
ROWS, WIDTH = 12, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one rank gave, got, and sent."""

    x: torch.Tensor
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor
    events: list[Event]


def values(seed: int, num_rows: int) -> torch.Tensor:
    """Return random rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, dtype=torch.float64, generator=generator)


def apply_each(context: RankContext, _: None) -> dict[str, Applied]:
    """Apply every function to rows of this rank, and run it backward."""
    group, events = tensor_group(context)
    found: dict[str, Applied] = {}
    for name in NAMES:
        gathers = name in ("GATHER_ROWS", "WHOLE_ROWS")
        x = values(group.index, ROWS // group.size if gathers else ROWS).requires_grad_()
        y = rows.MoveRows.apply(x, group, name, getattr(rows, name))
        # Strided, as the gradient of a part of a wider tensor is.
        dy = values(100 + group.index, y.shape[0]).t().contiguous().t()
        y.backward(dy)
        assert x.grad is not None
        sent, events.events[:] = list(events.events), []
        found[name] = Applied(x=x.detach(), y=y.detach(), dy=dy, dx=x.grad, events=sent)
    return found
