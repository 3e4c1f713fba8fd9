"""Kernels, bytes and FLOPs of what a rank gives its device."""

from __future__ import annotations

import torch

from echelon.rehearsal.log import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.rehearsal.work import Work, tensors_in


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
        two.add("mm", 10, 5)
    two.add("mul", 3, 0)
    one.add("mm", 10, 5)
    rest = two.minus(one)
    assert (rest.kernels, rest.bytes, rest.flops) == (2, 13, 5)
    assert rest.by_name == {"mm": 1, "mul": 1}
    assert rest.bytes_by_name == {"mm": 10, "mul": 3}


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
