# SPDX-License-Identifier: Apache-2.0
"""Bytes that stacks of experts of a module send over its tensor ranks, for each call of them.

Letters: N tokens of the call on all ranks, D their width, K experts of a token, E experts, n tensor
ranks, s bytes of an element, g of a gate. Of the rows (a token and one of its experts) S leave this
rank for experts elsewhere and R come from other ranks.

    whole stream         forward                       backward
    what experts make    all-reduce of N D s           -
    tokens and gates     -                             all-reduces of N D s and N K g

    along the sequence
    counts               all-to-all of 8 E             -
    rows and gates       S (D s + g)                   R (D s + g)
    what experts make    R D s                         S D s

Source: Lepikhin et al., "GShard", 2020, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.bytes.terms import INDEX_BYTES, all_reduce_bytes, all_to_all_bytes
from echelon.layout.modules.tensor import StackedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """Say what a module with experts was called with: sizes, and rows that leave and arrive."""

    tokens: int
    width: int
    choices: int
    leaving: int = 0
    arriving: int = 0


def module_expert_bytes(
    experts: StackedExperts,
    call: ExpertCall,
    *,
    degree: int,
    element_bytes: int,
    gate_bytes: int,
    backward: bool = True,
) -> int:
    """Return the bytes that a rank sends in one call and, unless told, its backward."""
    if degree == 1:
        return 0
    row = call.width * element_bytes
    if not experts.cut:
        tokens = all_reduce_bytes(call.tokens * row, degree)
        gates = all_reduce_bytes(call.tokens * call.choices * gate_bytes, degree)
        return tokens + (tokens + gates if backward else 0)
    counts = all_to_all_bytes(INDEX_BYTES * experts.num_experts, degree)
    ahead = counts + call.leaving * (row + gate_bytes) + call.arriving * row
    back = call.arriving * (row + gate_bytes) + call.leaving * row
    return ahead + (back if backward else 0)
