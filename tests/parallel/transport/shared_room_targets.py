"""What ranks of a test of shared memory do."""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.launch.context import RankContext
from tests.parallel.targets import tensor_group


def exchange_often(context: RankContext, argument: Any) -> dict[str, Any]:
    """Sum and gather tensors of several sizes, with the room and without, and compare the bits."""
    group, events = tensor_group(context)
    generator = torch.Generator().manual_seed(context.rank)
    most = TRAINING_PIECES.shared_bytes // 4
    sizes = [1, 7, 512, 4096, most, most + 1]
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    tensors = [
        torch.randint(-50, 50, (sizes[turn % 6],), generator=generator).to(dtypes[turn % 3])
        for turn in range(argument["turns"])
    ]
    wanted = []
    for tensor in tensors:
        total, parts = tensor.clone(), tensor.new_empty(group.size, len(tensor))
        group.all_reduce(total, name="sum").wait()
        group.all_gather(parts, tensor, name="parts").wait()
        wanted.append((total, parts))
    shares = group.share_memory()
    events.events.clear()
    same = True
    for tensor, (total, parts) in zip(tensors, wanted, strict=True):
        summed, gathered = tensor.clone(), torch.empty_like(parts)
        # The second begins before the first is waited for: it ends the first.
        first = group.all_reduce(summed, name="sum", async_op=True)
        second = group.all_gather(gathered, tensor, name="parts", async_op=True)
        second.wait()
        first.wait()
        same &= torch.equal(summed, total) and torch.equal(gathered, parts)
    sent = [(event.name, event.bytes) for event in events.events]
    return {"shares": shares, "same": same, "sent": sent, "numbers": [t.nbytes for t in tensors]}
