"""An operator computes by the function of its device; of shapes alone it makes nothing."""

from __future__ import annotations

import torch

from echelon.parallel.kernels.operators import define_operator


def _fill(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


def test_an_operator_writes_on_the_cpu_and_leaves_shapes_alone() -> None:
    define_operator("test_only_fill_(Tensor(a!) x, float value) -> ()", cpu=_fill)
    x = torch.zeros(2)
    torch.ops.echelon.test_only_fill_(x, 3.0)
    assert x.tolist() == [3.0, 3.0]
    torch.ops.echelon.test_only_fill_(torch.zeros(2, device="meta"), 3.0)
