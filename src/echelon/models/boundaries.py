# SPDX-License-Identifier: Apache-2.0
"""What passes between the parts of a decoder, and who listens to it.

A block reads the residual stream, and each of its parts has an output: a forward pass that goes
wrong goes wrong between two of these boundaries, and so does a backward pass.

Shape suffixes: N tokens (sequence first), D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block, Decoder

INPUT, OUTPUT = "input", "output"

PARTS = (
    *("attention_norm", "attention", "attention_post_norm"),
    *("mlp_norm", "mlp", "mlp_post_norm"),
)
"""The modules of a block whose outputs are boundaries, in the order of the forward pass: those that
a block has."""

FINAL_NORM = "norm"

Hear = Callable[[str, torch.Tensor, TokenBatch], None]
"""Learn the name of a boundary, what passes there, [N, D], and of which tokens."""


def listen_to_boundaries(decoder: Decoder, hear: Hear) -> Sequence[RemovableHandle]:
    """Let `hear` know of everything that passes a boundary of `decoder`, until it is removed.

    A block that is recomputed is heard again.
    """
    now: list[TokenBatch] = []
    handles: list[RemovableHandle] = []
    for module in decoder.layers.values():
        assert isinstance(module, Block), "a decoder is made of blocks"
        handles += _listen_to_block(module, hear, now)
    if decoder.last:

        def before_all(_: nn.Module, inputs: tuple[torch.Tensor | None, TokenBatch]) -> None:
            # A stage may have no block that would say which batch it is.
            now[:] = [inputs[1]]

        def after_norm(_: nn.Module, _inputs: Any, y_ND: torch.Tensor) -> None:
            if now:
                hear(FINAL_NORM, y_ND, now[0])

        handles.append(decoder.register_forward_pre_hook(before_all))
        handles.append(decoder.norm.register_forward_hook(after_norm))
    return handles


def _listen_to_block(block: Block, hear: Hear, now: list[TokenBatch]) -> list[RemovableHandle]:
    """Listen to one block; `now` holds the batch that the decoder works on."""
    site = f"layers.{block.index}"

    def before(_: nn.Module, inputs: tuple[torch.Tensor, TokenBatch]) -> None:
        now[:] = [inputs[1]]
        hear(f"{site}.{INPUT}", *inputs)

    def after(part: str) -> Callable[[nn.Module, Any, Any], None]:
        # A norm at the head of a branch gives the stream, too, which is heard elsewhere.
        return lambda _, _inputs, y: hear(
            f"{site}.{part}", y[1] if isinstance(y, tuple) else y, now[0]
        )

    return [
        block.register_forward_pre_hook(before),
        *(
            getattr(block, part).register_forward_hook(after(part))
            for part in PARTS
            if hasattr(block, part)
        ),
        block.register_forward_hook(after(OUTPUT)),
    ]
