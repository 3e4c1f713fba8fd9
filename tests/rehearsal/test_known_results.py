"""What operations make of shapes is the same when it is remembered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, KnownResults, ShapesOnly
from echelon.rehearsal.work import tensors_in


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


OPERATIONS: list[Callable[[], object]] = [
    lambda: x(3, 4) * 2,
    lambda: x(3, 4, dtype=torch.bfloat16) + x(4),
    lambda: x(3, 4).t() @ x(3, 5),
    lambda: torch.mm(x(3, 4), x(4, 5), out=x(3, 5)),
    lambda: x(3, 4).mul_(x(4)),
    lambda: x(6, 8).topk(2, dim=-1),
    lambda: x(6, 8).sort(stable=True),
    lambda: x(4, 6).transpose(0, 1).contiguous(),
    lambda: x(4, 6).softmax(-1),
    lambda: x(4, 6).to(torch.bfloat16),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_remembered_is_what_pytorch_makes(operation: Callable[[], object]) -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        made = [operation() for _ in range(2)]
    plain = list(tensors_in(operation()))
    for one in made:
        for ours, theirs in zip(tensors_in(one), plain, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
                theirs.device,
            )
    (work,) = shapes.work.by_task.values()
    assert work.kernels % 2 == 0  # as many the second time as the first


def test_what_differs_in_anything_is_another_result() -> None:
    with ShapesOnly(RankLog(0)):
        assert (x(4) * 2).dtype == torch.float32
        assert (x(4, dtype=torch.int64) * 2).dtype == torch.int64
        assert (x(4, dtype=torch.int64) * 2.0).dtype == torch.float32
        assert x(4, 2).sum(0).shape == (2,)
        assert x(4, 2).sum(1).shape == (4,)


def test_results_are_tensors_of_their_own() -> None:
    with ShapesOnly(RankLog(0)):
        a = x(4)
        first, second = a + 1, a + 1
        assert first is not second
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        for _ in range(2):
            assert a.mul_(2) is a
            assert torch.add(a, 1, out=first) is first


def test_what_one_rank_knows_another_may_use() -> None:
    known = KnownResults()
    with ShapesOnly(RankLog(0), known):
        x(3, 4).mul_(2)
    with ShapesOnly(RankLog(1), known) as shapes:
        a = x(3, 4)
        made = a.mul_(2)
    assert made is a
    assert shapes.work.by_task[""].kernels == 1
    assert shapes.memory.peak_bytes == 48
