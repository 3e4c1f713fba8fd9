"""What a block gives a GPU to do: recorded, so that it grows only when somebody wants it to."""

from __future__ import annotations

import pytest

from tests.rehearsal.work.block_work import CASES, counted, recorded


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_the_work_of_a_block_is_what_is_recorded(name: str) -> None:
    """`python -m tests.rehearsal.work.block_work` records it anew."""
    found, before = counted(name), recorded()[name]
    assert found.keys() == before.keys()
    for part, counts in found.items():
        for what, count in counts.items():
            assert count <= before[part][what], f"{part} has more {what} than before"
        assert counts == before[part], f"{part} has less to do: record it"


def test_the_flops_of_a_block_are_those_of_its_formula() -> None:
    """Two for each weight and token, and the products of causal attention; twice that backward."""
    tokens, hidden, ffn, keys = 8192, 4096, 14336, 1024
    weights = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * ffn
    attention = 2 * 2 * tokens * tokens * hidden  # the kernel's formula counts masked pairs, too
    block = recorded()["llama3-8b"]["block.F"]
    assert block["flops"] == pytest.approx(2 * tokens * weights + attention, rel=1e-3)
    mixture = recorded()["mixtral-8x7b"]["block.F"]
    dense = 2 * hidden * hidden + 2 * hidden * keys
    both = 2 * tokens * (dense + 2 * 3 * hidden * ffn) + attention
    assert mixture["flops"] == pytest.approx(both, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "most_bytes"), [("llama3-8b", 3.84e9), ("qwen3-8b", 3.84e9), ("mixtral-8x7b", 9.0e9)]
)
def test_kernels_move_much_less_than_plain_operations(name: str, most_bytes: float) -> None:
    """Of a block forward and backward, beside its products and attention."""
    moved = {
        case: sum(
            recorded()[case][f"block.{task}"]["bytes_of_memory_bound"] for task in ("F", "BW")
        )
        for case in (name, f"{name}, plain")
    }
    assert moved[name] <= most_bytes
    assert 2.5 * moved[name] <= moved[f"{name}, plain"]
    for task in ("F", "BW"):
        fused, plain = (recorded()[case][f"block.{task}"] for case in moved)
        assert 2 * fused["kernels"] < plain["kernels"]
        assert fused["flops"] == plain["flops"]
