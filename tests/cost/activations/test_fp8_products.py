"""Products of 8-bit numbers by hand: what a kernel reads, and what is widened without one."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import Plan, Precision
from echelon.cost.activations.fp8_products import ExpertProducts, Fp8Products, fp8_product_bytes
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.bytes.quantised import widened_element_bytes
from echelon.rehearsal.run import on_nccl
from tests.parallel.layouts import MIXTRAL, plan_of

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
