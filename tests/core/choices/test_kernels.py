"""Which provider computes a piece."""

from __future__ import annotations

from echelon.core.choices.kernels import Kernels


def test_pieces_that_are_not_fused_are_plain() -> None:
    kernels = Kernels(provider="triton", fused=("norm",))
    assert kernels.of("norm") == "triton"
    assert kernels.of("loss") == "plain"
