"""An MLP over tensor ranks: one sum forward, and what the other order of cuts would send."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.config.load import load_job
from echelon.cost.bytes.sent import bytes_sent
from echelon.page.lessons.matrices import mlp_of
from echelon.page.lessons.tensor.pair import MEGATRON, OTHER, mlp_pair, sent_in_forward
from tests.page.lessons.shown import facts, numbers, tiles_of


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.system("S58")
def test_nothing_is_sent_before_the_sum_at_the_end(degree: int) -> None:
    frames = mlp_pair().scene(cut=MEGATRON, ranks=str(degree)).frames
    assert len(frames) == 5
    assert [facts(one)["a rank sends"] for one in frames[:4]] == ["0 B"] * 4
    assert facts(frames[4])["a rank sends"] != "0 B"
    assert facts(frames[4])["equal to one device"] == "yes"


@pytest.mark.parametrize("degree", [2, 4])
def test_what_is_drawn_multiplies(degree: int) -> None:
    frames = mlp_pair().scene(cut=MEGATRON, ranks=str(degree)).frames
    total = 0
    for rank in range(degree):
        group = f"rank {rank}"

        def drawn(step: int, label: str, group: str = group) -> np.ndarray:
            (tile,) = tiles_of(frames[step], label, group)
            return np.array(numbers(tile.label))

        x, first = drawn(0, "X"), drawn(0, f"W1, part {rank}")
        inner = drawn(1, "X W1")
        assert np.array_equal(x @ first, inner)
        active = drawn(2, "max(0, x)")
        assert np.array_equal(np.maximum(0, inner), active)
        part = drawn(3, "summand of Y")
        assert np.array_equal(active @ drawn(3, f"W2, part {rank}"), part)
        total = total + part
    for rank in range(degree):
        (out,) = tiles_of(frames[4], "Y", f"rank {rank}")
        assert np.array_equal(np.array(numbers(out.label)), total)


def test_a_block_of_the_engine_sends_as_often_as_the_lesson() -> None:
    # Of a block's sums forward one is attention's, and one is the MLP's.
    sets = ("model.layers=1", "mesh.tp=2", "mesh.sequence_parallel=false")
    plan = load_job("nano", sets).plan
    counts = {term.name: term.count / plan.num_microbatches for term in bytes_sent(plan, 0)}
    assert counts["blocks forward"] / 2 == 1


@pytest.mark.parametrize("degree", [2, 4])
def test_the_other_order_sends_more(degree: int) -> None:
    mlp = mlp_of(2, 4, 8)
    ours, other = (sent_in_forward(mlp, one, degree) for one in (MEGATRON, OTHER))
    # 2 x 4 outputs and 2 x 8 inner numbers of two bytes.
    assert ours == 2 * (degree - 1) * 16 // degree
    assert other == 2 * (degree - 1) * 32 // degree + (degree - 1) * 16 // degree
    frames = mlp_pair().scene(cut=OTHER, ranks=str(degree)).frames
    assert facts(frames[4])["sent in the whole forward pass"] == f"{other} B"
    assert facts(frames[4])["equal to one device"] == "yes"
    assert facts(frames[2])["wrong, if each activates its own summand"].startswith(
        str(mlp.rows_then_columns(degree).num_wrong)
    )
