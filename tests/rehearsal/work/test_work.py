"""Kernels, bytes and FLOPs of what a rank gives its device."""

from __future__ import annotations

import torch

from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.rehearsal.work import KernelWork, Product, Work, tensors_in


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def test_kernels_bytes_and_flops_are_counted_by_task() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        a, b = x(3, 4), x(4, 5)
        shapes.task = "F"
        _ = a @ b
        a.view(12)
        a.mul_(2)
        torch.mm(a, b, out=x(3, 5))
    work = shapes.work.by_task["F"]
    assert "" not in shapes.work.by_task
    assert work.by_name == {"mm": 2, "mul_": 1}
    product = 4 * (3 * 4 + 4 * 5 + 3 * 5)
    assert work.bytes == 2 * product + 4 * 2 * 12  # in place is read and written
    assert work.flops == 2 * 2 * 3 * 4 * 5


def test_work_is_taken_from_work() -> None:
    two, one = Work(), Work()
    for _ in range(2):
        two.add(KernelWork("mm", 10, 5))
    two.add(KernelWork("mul", 3, 0))
    one.add(KernelWork("mm", 10, 5))
    rest = two.minus(one)
    assert (rest.kernels, rest.bytes, rest.flops) == (2, 13, 5)
    assert rest.by_name == {"mm": 1, "mul": 1}
    assert rest.bytes_by_name == {"mm": 10, "mul": 3}
    assert rest.each == {KernelWork("mm", 10, 5): 1, KernelWork("mul", 3, 0): 1}


def test_tensors_are_found_in_lists() -> None:
    a, b = x(1), x(2)
    assert [one.numel() for one in tensors_in((a, [b, 3], None))] == [1, 2]


def test_products_of_groups_have_their_flops() -> None:
    ends = torch.empty(3, dtype=torch.int32, device=META)
    rows, matrices = x(12, 8, dtype=torch.bfloat16), x(3, 8, 16, dtype=torch.bfloat16)
    with ShapesOnly(RankLog(0)) as shapes:
        out = torch.ops.aten._grouped_mm(rows, matrices, offs=ends)
        assert shapes.work.by_task[""].flops == 2 * 12 * 8 * 16
        torch.ops.aten._grouped_mm(out.t(), rows, offs=ends)
    assert shapes.work.by_task[""].flops == 2 * 2 * 12 * 8 * 16


def test_products_have_their_sizes() -> None:
    half = torch.bfloat16
    rows, matrices = x(12, 8, dtype=half), x(3, 8, 16, dtype=half)
    ends = torch.empty(3, dtype=torch.int32, device=META)
    with ShapesOnly(RankLog(0)) as shapes:
        torch.mm(x(3, 4), x(4, 5))
        torch.addmm(x(3, 5), x(3, 4), x(4, 5))
        torch.bmm(x(7, 3, 4), x(7, 4, 5))
        out = torch.ops.aten._grouped_mm(rows, matrices, offs=ends)
        torch.ops.aten._grouped_mm(out.t(), rows, offs=ends)
        x(3, 4).mul(2)
    found = [one.product for one in shapes.work.by_task[""].each]
    assert found == [
        Product(3, 4, 5, 4),
        Product(3, 4, 5, 4),
        Product(3, 4, 5, 4, times=7),
        Product(4, 8, 16, 2, times=3),
        Product(16, 4, 8, 2, times=3),
        None,
    ]
    flops = [2 * one.rows * one.depth * one.columns * one.times for one in found if one]
    assert flops == [one.flops for one in shapes.work.by_task[""].each if one.product]


def test_attention_meets_the_keys_before_a_query() -> None:
    half = torch.bfloat16
    q, k, v = (x(2, heads, 64, 16, dtype=half) for heads in (4, 4, 4))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with ShapesOnly(RankLog(0)) as shapes:
        for causal in (True, False):
            flash(q, k, v, 0.0, causal)
    some, whole = shapes.work.by_task[""].each
    assert (some.flops, some.done, some.keys) == (4 * 2 * 4 * 64 * 64 * 16, 0.5, 32.0)
    assert (whole.flops, whole.done, whole.keys) == (some.flops, 1.0, 64.0)
