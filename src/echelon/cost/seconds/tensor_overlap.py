# SPDX-License-Identifier: Apache-2.0
"""Seconds that tensor ranks wait for rows, where products run beside the messages of their rows.

A gather before a product of s seconds is tp - 1 messages of m seconds each. In chunks the product
takes c = s(N / tp) seconds a chunk, no less than s / tp, for small products are less efficient. A
message travels beside each chunk but one (Wang et al., 2023, section 3), so both take

    c + (tp - 1) max(c, m)     and the exchange shows    c + (tp - 1) max(c, m) - s

A sum that is scattered after a product takes as long: the part of a rank's own rows comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.group_links import pairwise_group_links
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.links.collectives import point_to_point_seconds
from echelon.cost.seconds.links.exchanges import tensor_exchange
from echelon.cost.seconds.matmul import matmul_seconds

LayerPair: TypeAlias = "tuple[Num, Num]"
"""Columns that a rank has of a layer which reads the stream, and those that go back into it."""

STEP_KERNELS = 3.0
"""Kernels of each further chunk: its product, its sum with what came, its message."""
EXCHANGES = 4.0
"""Gathers and scattered sums of a pass through a block, forward or of the gradients of inputs."""
LEAST_SHOWN = 0.25
"""The share of what a backward pass sends that weight gradients never hide."""


def tensor_seconds(
    work: CostInputs, hidden: Num, pairs: Sequence[LayerPair | None]
) -> tuple[Num, Num]:
    """Return what a block waits for its tensor ranks, forward and in backward.

    `hidden` are the seconds of weight gradients that backward has for it. Of each branch of the
    block `pairs` has the columns, None where it does not compute in chunks.
    """
    forward, backward = tensor_exchange(work)
    shown = np.maximum(LEAST_SHOWN * backward, backward - hidden)
    chunked = np.asarray(work.layout.tp_overlap * work.layout.sequence_parallel) > 0
    if not chunked.any():
        return forward, shown
    each = forward / EXCHANGES
    model, first, second = work.model, 0.0 * forward, 0.0 * forward
    # What is left is sent at once: inputs for the gradients of weights.
    rest = backward - EXCHANGES * each
    for pair in pairs:
        if pair is None:
            first, rest = first + 2.0 * each, rest + 2.0 * each
            continue
        out, back = pair
        first = first + shown_in_chunks(work, model.hidden, out)
        first = first + shown_in_chunks(work, back, model.hidden)
        second = second + shown_in_chunks(work, out, model.hidden)
        second = second + shown_in_chunks(work, model.hidden, back)
    second = second + np.maximum(LEAST_SHOWN * rest, rest - hidden)
    return np.where(chunked, first, forward), np.where(chunked, second, shown)


def shown_in_chunks(work: CostInputs, depth: Num, columns: Num) -> Num:
    """Return what shows of an exchange beside a product of all tokens of so many columns."""
    tp, machine = work.layout.tp, work.machine
    whole = matmul_seconds(machine, work.tokens, depth, columns, work.element)
    chunk = matmul_seconds(machine, work.tokens / tp, depth, columns, work.element)
    rows = work.element * work.tokens / tp * work.model.hidden
    message = point_to_point_seconds(pairwise_group_links(work, tp, 1.0), rows)
    slowed = work.software.interference * np.minimum(message, chunk)
    steps = (tp - 1.0) * (np.maximum(message, chunk) + slowed)
    return np.maximum(0.0, chunk + steps - whole)


def chunk_kernels(work: CostInputs) -> Num:
    """Return how many kernels more a pass has whose products are done in chunks."""
    layout = work.layout
    chunked = layout.tp_overlap * layout.sequence_parallel
    return chunked * EXCHANGES * STEP_KERNELS * np.maximum(layout.tp - 1.0, 0.0)
