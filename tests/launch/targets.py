"""What ranks run in these tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.launch.context import RankContext


def add_ranks(context: RankContext, argument: Any) -> dict[str, Any]:
    """Sum the ranks of the world, times `argument`."""
    total = torch.tensor(float(context.rank) * argument)
    dist.all_reduce(total)
    return {"rank": context.rank, "world": dist.get_world_size(), "total": total.item()}
