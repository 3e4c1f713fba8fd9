"""The bytes of one call of experts, by hand; what ranks really send is in tests/parallel/module."""

from __future__ import annotations

from echelon.cost.bytes.modules.experts import ExpertCall, module_expert_bytes
from echelon.layout.modules.tensor import StackedExperts

CALL = ExpertCall(tokens=10, width=6, choices=2, leaving=3, arriving=5)


def sent(*, cut: bool, degree: int = 2, backward: bool = True) -> int:
    """Return the bytes of a call: elements of 2 bytes, gates of 4."""
    experts = StackedExperts(name="e", num_experts=4, cut=cut)
    return module_expert_bytes(
        experts, CALL, degree=degree, element_bytes=2, gate_bytes=4, backward=backward
    )


def test_ranks_with_all_tokens_add_up() -> None:
    tokens, gates = 10 * 6 * 2, 10 * 2 * 4
    assert sent(cut=False, backward=False) == tokens  # 2 (n - 1) / n
    assert sent(cut=False) == 2 * tokens + gates


def test_rows_travel_to_their_experts_and_back() -> None:
    counts, row, gate = 4 * 8 // 2, 6 * 2, 4
    assert sent(cut=True, backward=False) == counts + 3 * (row + gate) + 5 * row
    assert sent(cut=True) == counts + 8 * (2 * row + gate)


def test_one_rank_sends_nothing() -> None:
    assert sent(cut=False, degree=1) == sent(cut=True, degree=1) == 0
