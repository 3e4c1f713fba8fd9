"""What ranks run to see that nothing uses memory that was given back."""

from __future__ import annotations

from unittest.mock import patch

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from tests.parallel.targets import own_batches


def spoil_freed(context: RankContext, plan: Plan) -> tuple[list[int], list[float]]:
    """Take steps in which memory that is given back is filled with NaN; return pieces and losses.

    `pieces` is how many pieces of memory the stocks of the rank had made after each step.
    """
    stocks: list[BufferPool] = []
    init, take_back = BufferPool.__init__, BufferPool.give_back

    def noted(stock: BufferPool, device: torch.device) -> None:
        init(stock, device)
        stocks.append(stock)

    def spoiled(stock: BufferPool, piece: torch.Tensor) -> None:
        piece.fill_(0xFF)  # NaN in every dtype of a parameter
        take_back(stock, piece)

    with (
        patch.object(BufferPool, "__init__", noted),
        patch.object(BufferPool, "give_back", spoiled),
    ):
        engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
        pieces: list[int] = []
        losses: list[float] = []
        for step in range(3):
            losses.append(engine.step(own_batches(engine, step), step).loss)
            pieces.append(sum(stock.num_buffers for stock in stocks))
        return pieces, losses
