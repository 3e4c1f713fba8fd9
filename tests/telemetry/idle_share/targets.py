"""A rank of a pipeline whose stages take a fixed time and next to no processor: what they are."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch

from echelon.launch.context import RankContext
from echelon.models.decoder import Decoder
from echelon.training.loop import TrainSummary, train_rank


def train_with_timed_stages(context: RankContext, argument: dict[str, Any]) -> TrainSummary | None:
    """Train one rank; each forward pass of a stage sleeps, and so does each backward pass.

    Ranks that sleep do not share cores, so a trace shows the order of the executor and its waits.
    """
    forward, backward_s = Decoder.forward, argument["backward_s"]

    def timed(self: Decoder, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(argument["forward_s"])
        out = forward(self, *args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(backward_s))
        return out

    with patch.object(Decoder, "forward", timed):
        return train_rank(context, argument["task"])
