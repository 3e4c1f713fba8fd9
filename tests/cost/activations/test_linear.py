"""What norms, dropouts and dense MLPs keep, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.linear import (
    DOWN,
    ResidualBranch,
    dropout_operator,
    dropout_saved,
    mlp_operators,
    mlp_saved,
    norm_saved,
)
from echelon.cost.activations.numbers import ActivationNumbers
from echelon.cost.activations.operator_memory import SavedTensor, total_saved_bytes
from tests.parallel.layouts import GPT2, plan_of

X = activation_numbers_from_plan(plan_of(dtype="fp32"))
"""8 tokens 16 wide, 24 inside, gate and up, in four bytes."""

SPLIT = activation_numbers_from_plan(plan_of(tp=2, sequence_parallel=True, dtype="bf16"))


def _bytes(saved: tuple[SavedTensor, ...]) -> dict[tuple[str, str], object]:
    return {(one.operator, one.name): one.bytes for one in saved}


def test_a_dense_mlp_by_hand() -> None:
    assert _bytes(mlp_saved(X)) == {
        ("mlp norm", "residual stream"): 8 * 16 * 4,
        ("mlp norm", "statistics"): 8 * 4,
        ("gate, up", "mlp input"): 8 * 16 * 4,
        ("activation", "gate and up"): 8 * 2 * 24 * 4,
        (DOWN, "input"): 8 * 24 * 4,
    }


def test_under_sequence_parallelism_the_stream_is_cut_and_the_inside_by_columns() -> None:
    assert _bytes(mlp_saved(SPLIT)) == {
        ("mlp norm", "residual stream"): 4 * 16 * 2,
        ("mlp norm", "statistics"): 4 * 4,
        ("gate, up", "mlp input"): 4 * 16 * 2,
        ("activation", "gate and up"): 8 * 2 * 12 * 2,
        (DOWN, "input"): 8 * 12 * 2,
    }


@pytest.mark.parametrize("x", [X, SPLIT], ids=["fp32", "bf16, cut"])
def test_operators_keep_what_is_told_and_have_room_for_it(x: ActivationNumbers) -> None:
    operators = mlp_operators(x)
    assert [one.name for one in operators] == ["mlp norm", "gate, up", "activation", DOWN]
    kept = sum(total_saved_bytes(one.saved) for one in operators)
    assert kept == total_saved_bytes(mlp_saved(x))
    assert all(one.backward >= one.backward_split or one.early is not None for one in operators)


def test_a_layer_norm_has_a_mean_too() -> None:
    x = activation_numbers_from_plan(plan_of(model=GPT2, dtype="fp32"))
    assert [one.bytes for one in norm_saved(x, "norm")] == [8 * 16 * 4, 2 * 8 * 4]


def test_masks_are_of_a_byte_where_elements_are_narrow() -> None:
    assert dropout_saved(X, "dropout").bytes == 0
    assert dropout_saved(replace(X, dropout=1), "dropout").bytes == 8 * 16 * 4
    assert dropout_saved(replace(SPLIT, dropout=1), "dropout").bytes == 4 * 16
    # Drawing takes four numbers of 64 bits an element.
    drawn = dropout_operator(replace(X, dropout=1), "dropout")
    assert drawn.forward == X.stream + 32 * 8 * 17


def test_the_gradient_of_the_stream_goes_around_a_branch() -> None:
    branch = ResidualBranch(inner=100, column=30)
    assert branch.split_stream_gradient(X) == 0
    assert branch.split_stream_gradient(SPLIT) == SPLIT.stream
    assert branch.row_layer_bytes(X) == branch.column_layer_bytes(X) == 0
    assert branch.row_layer_bytes(SPLIT) == 100 + SPLIT.whole
    assert branch.column_layer_bytes(SPLIT) == 30 + SPLIT.whole + SPLIT.stream
    assert ResidualBranch(inner=100, flushed=1).row_layer_bytes(SPLIT) == 0
