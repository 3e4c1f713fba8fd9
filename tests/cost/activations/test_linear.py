"""What norms, dropouts and dense MLPs keep, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Plan, Precision
from echelon.cost.activations.linear import (
    DOWN,
    ExpertProducts,
    Fp8Products,
    ResidualBranch,
    dropout_operator,
    dropout_saved,
    fp8_product_bytes,
    mlp_operators,
    mlp_saved,
    norm_saved,
)
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    SavedTensor,
    activation_numbers_from_plan,
    total_saved_bytes,
)
from echelon.cost.bytes.quantised import widened_element_bytes
from echelon.rehearsal.run import on_nccl
from tests.parallel.layouts import GPT2, MIXTRAL, plan_of

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


OUT, IN, ROWS = 6, 4, 10
BF16, FP32 = 2, 4
FP8 = Precision(parameters="bf16", matmul="fp8", fp8_block=4)


def _plan(precision: Precision = FP8) -> Plan:
    plan = plan_of(model=MIXTRAL)
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))


def test_a_kernel_reads_codes_and_turns_them_for_the_input_gradient() -> None:
    kernel = Fp8Products(size=BF16, wide=0, casts=1)
    assert kernel.bytes(OUT, IN, ROWS) == OUT * IN
    assert kernel.bytes(OUT, IN, ROWS, turned=1) == 2 * OUT * IN
    # Codes that were gathered are there anyway.
    assert replace(kernel, casts=0).bytes(OUT, IN, ROWS) == 0


def test_a_cpu_widens_both_and_casts_its_result() -> None:
    cpu = Fp8Products(size=BF16, wide=FP32, casts=1)
    weight = OUT * IN * (1 + FP32)
    # Rows and result in float32; of the result, what is less in bf16 is counted with it.
    multiplied = ROWS * (IN * FP32 + OUT * (FP32 - BF16))
    assert cpu.bytes(OUT, IN, ROWS) == weight + max(multiplied, ROWS * OUT * FP32)
    turned = max(ROWS * (OUT * FP32 + IN * (FP32 - BF16)), ROWS * IN * FP32)
    assert cpu.bytes(OUT, IN, ROWS, turned=1) == weight + turned
    # In float32 the result is what was multiplied.
    assert replace(cpu, size=FP32).bytes(OUT, IN, ROWS) == weight + ROWS * IN * FP32


def test_devices_widen_to_what_is_exact() -> None:
    assert widened_element_bytes(FP8, on_gpu=False) == FP32
    assert widened_element_bytes(FP8, on_gpu=True) == BF16
    assert widened_element_bytes(replace(FP8, fp8_block=128), on_gpu=True) == 0
    assert widened_element_bytes(replace(FP8, fp8_scales="tensor"), on_gpu=True) == 0
    assert widened_element_bytes(replace(FP8, parameters="fp64"), on_gpu=False) == 8
    assert widened_element_bytes(replace(FP8, matmul="parameters"), on_gpu=False) == 0


def test_other_dtypes_have_nothing_of_it() -> None:
    plain = _plan(replace(FP8, matmul="parameters"))
    assert fp8_product_bytes(activation_numbers_from_plan(plain), OUT, IN, ROWS) == 0
    assert ExpertProducts.of(plain, 8, (3, 5)) == ExpertProducts()
    assert fp8_product_bytes(activation_numbers_from_plan(_plan()), OUT, IN, ROWS) > 0


def test_the_fullest_expert_counts_and_all_rows_are_cast() -> None:
    hidden, inner = MIXTRAL.hidden, 8
    one, two = (ExpertProducts.of(_plan(), inner, rows) for rows in ((5,), (5, 3)))
    # Three more rows: their codes, and a scale of 4 bytes for every 4 numbers.
    assert two.forward - one.forward == 3 * hidden * 2
    assert two.backward - one.backward == 3 * hidden * 2
    assert two.weight_gradient == one.weight_gradient == 5 * (2 * inner + hidden) * BF16
    # A GPU has no copies of operands in float32.
    assert ExpertProducts.of(on_nccl(_plan()), inner, (5, 3)).forward < two.forward
