"""What attention works with: one call of a kernel by hand, and what more places and pieces add."""

from __future__ import annotations

import pytest

from echelon.core.plan import Context, ContextKind
from echelon.cost.activations.attention_row_chunks import AttentionRowChunks, RowChunkSizes
from echelon.cost.activations.attention_working import attention_working_bytes
from tests.parallel.layouts import plan_of

OUT, KEYS, LSE = 8 * 4 * 4, 8 * 2 * 2 * 4, 8 * 4
"""Elements of the output, of keys and values, and of log-sum-exps, of 8 tokens."""


def test_alone_a_kernel_has_its_results() -> None:
    plan = plan_of(dtype="fp32")
    assert attention_working_bytes(plan, 0) == ((OUT + LSE) * 4, 0, 0, (OUT + KEYS) * 4)


def test_pieces_are_merged_and_their_gradients_added_up() -> None:
    half = RowChunkSizes(queries=4, keys=4, sequences=1)
    pieces = AttentionRowChunks(forward=((half, half),), backward=((half, half),))
    forward, *_, backward = attention_working_bytes(plan_of(dtype="fp32"), 0, pieces)
    # The sum of all, one half, and three log-sum-exps of it; gradients of all, and of one half.
    assert forward == (OUT + LSE + OUT // 2 + LSE // 2 + 3 * LSE // 2) * 4
    assert backward == (OUT + KEYS + (OUT + KEYS) // 2) * 4


@pytest.mark.parametrize(("kind", "degree"), [("ring", 1), ("gathered", 1), ("ulysses", 4)])
def test_twice_the_sequences_work_with_twice_as_much(kind: ContextKind, degree: int) -> None:
    context = Context(kind=kind, ulysses_degree=degree)
    one, two = (
        attention_working_bytes(plan_of(cp=4, context=context, microbatch_sequences=n), 0)
        for n in (1, 2)
    )
    if kind == "gathered":
        # The positions of gathered keys are those of one sequence.
        assert all(a < b <= 2 * a for a, b in zip(one, two, strict=True) if a)
    else:
        assert two == tuple(2 * size for size in one)
