"""bf16 and fp16: kernels are as exact as plain PyTorch, keep little in fp32, overflow late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.model_shape import ModelShape
from echelon.core.piece_sizes import PieceSizes
from echelon.models.batch import IGNORED_LABEL
from echelon.models.operations import LossHead, Operations
from echelon.parallel.context import ContextAttention
from echelon.parallel.operations import RankOperations
from echelon.parallel.tensor import TensorSplit
from tests.models.batches import blank_batch
from tests.parallel.buckets import alone
from tests.parallel.layouts import plan_of
from tests.parallel.recorded_gradients import RecordedGradients

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDTH, VOCAB, HEAD_DIM = 48, 203, 16
PIECE = 512
LOSS_ROWS = 30

Weights = Sequence[torch.nn.Parameter]
Compute = Callable[[Operations, torch.Tensor, Weights], torch.Tensor]


def values(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    """Return random float32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


LABELS = torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(5))
LABELS[3:9] = IGNORED_LABEL
TURNED = ModelShape(
    name="turned",
    layers=1,
    hidden=1,
    heads=1,
    kv_heads=1,
    head_dim=HEAD_DIM,
    ffn=1,
    vocab=1,
    max_positions=64,
)


def rms_norm(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Normalise without a bias."""
    return ops.norm(x, weights[0], None, 1e-5)


def layer_norm(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Normalise with a bias."""
    return ops.norm(x, weights[0], weights[1], 1e-5)


def swiglu(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Multiply by a gate."""
    return ops.gate(x, "silu")


def head_loss(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return the mean loss, or so."""
    return ops.head_loss(x, LossHead(weight_VD=weights[0]), LABELS, 1 / 64)


def scaled_loss(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return a loss whose factor is no fp16 number."""
    return ops.head_loss(x, LossHead(weight_VD=weights[0]), LABELS, 2.0**20)


def rotate(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Turn the middle heads of a wider tensor."""
    part = x.split((3, 2, 1), dim=2)[1]
    return ops.rotate(part, *ops.rotary_tables(TURNED, blank_batch(x.shape[0], x.shape[1]), x))


def heads_norm(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Normalise some heads of a wider tensor."""
    return ops.head_norm(x.split((3, 2, 1), dim=2)[1], weights[0], 1e-6)


def attend(ops: Operations, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Attend with two query heads to a key/value head."""
    q, k, v = (x * 2).split((4, 2, 2), dim=2)
    return ops.attend(q, k, v, TURNED, blank_batch(x.shape[0], x.shape[1]))


ROUNDED_ONCE = ("rms norm", "heads", "layer norm", "rotate")


@dataclass(frozen=True, slots=True)
class Case:
    """What is computed of x and weights (their values, and x's); how large dy is."""

    name: str
    compute: Compute
    x: torch.Tensor
    weights: tuple[torch.Tensor, ...] = ()
    dy: float = 1.0


ONES = 1 + values(WIDTH, seed=1, size=0.2)
HEAD = values(VOCAB, WIDTH, seed=10, size=0.5)
CASES = [
    Case("rms norm", rms_norm, values(70, WIDTH, seed=2), (ONES,)),
    Case("heads", heads_norm, values(9, 2, 6, HEAD_DIM, seed=3), (ONES[:HEAD_DIM],)),
    Case("layer norm", layer_norm, values(70, WIDTH, seed=4) + 0.5, (ONES, ONES)),
    Case("swiglu", swiglu, values(70, WIDTH, seed=6, size=3.0)),
    Case("rotate", rotate, values(40, 2, 6, HEAD_DIM, seed=7)),
    Case("attention", attend, values(40, 2, 8, HEAD_DIM, seed=8)),
    Case("loss", head_loss, values(70, WIDTH, seed=9), (HEAD,)),
]
LARGE = [
    Case("rms norm", rms_norm, values(70, WIDTH, seed=2, size=1e4), (ONES * 3,), dy=1e4),
    Case("layer norm", layer_norm, values(70, WIDTH, seed=4, size=1e4), (ONES * 3, ONES), dy=1e4),
    Case("attention", attend, values(40, 2, 8, HEAD_DIM, seed=8, size=60.0)),
    Case("loss", head_loss, values(70, WIDTH, seed=9), (HEAD,), dy=2.0**18),
    Case("scaled loss", scaled_loss, values(70, WIDTH, seed=9), (HEAD,), dy=2.0**-8),
]


class Alone(RankOperations):
    """The operations of a rank alone."""

    def __init__(self) -> None:
        self.noted = RecordedGradients()
        split = TensorSplit(
            group=alone(),
            sequence_parallel=False,
            store=self.noted,
            pieces=PieceSizes(row_elements=PIECE, loss_rows=LOSS_ROWS),
        )
        context = ContextAttention(plan_of(), alone(), alone(), self.noted)
        super().__init__(split, VOCAB, context)


def inputs(
    case: Case, dtype: torch.dtype, used: torch.dtype
) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """Return x and the weights of a case, rounded to `dtype`, as `used`."""
    x = case.x.to(dtype).to(used).clone().requires_grad_()
    return x, [torch.nn.Parameter(one.to(dtype).to(used)) for one in case.weights]


def outcome(
    case: Case, dtype: torch.dtype, used: torch.dtype, ops: Operations
) -> dict[str, torch.Tensor]:
    """Return output, input gradient and weight gradients of a case, computed in `used`."""
    x, weights = inputs(case, dtype, used)
    y = case.compute(ops, x, weights)
    dy = values(*y.shape, seed=11, size=case.dy)
    y.backward((dy.to(dtype) if y.shape else dy).to(y.dtype))
    assert x.grad is not None
    found = {"output": y.detach(), "input gradient": x.grad}
    for index, weight in enumerate(weights):
        given = ops.noted.of(weight) if isinstance(ops, Alone) else weight.grad
        assert given is not None
        found[f"gradient {index}"] = given
    return found


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the norm."""
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_is_as_exact_as_plain_pytorch(case: Case, dtype: torch.dtype) -> None:
    exact = outcome(case, dtype, torch.float64, Operations())
    plain = outcome(case, dtype, dtype, Operations())
    for name, got in outcome(case, dtype, dtype, Alone()).items():
        own, theirs = error(got, exact[name]), error(plain[name], exact[name])
        assert own <= 2 * theirs, (name, own, theirs)
        if case.name in ROUNDED_ONCE:
            # The gradient of a norm's weight is a sum over tokens that stays in fp32.
            assert own <= (1e-6 if "gradient " in name else ROUNDOFF[dtype] / 2), (name, own)
            assert got.dtype == (torch.float32 if "gradient " in name else dtype)


class Made(TorchDispatchMode):
    """Note dtype and size of every floating-point tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.tensors.append((one.dtype, one.numel()))
        return result


def made_by(case: Case, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """Return what forward and backward of a kernel make; tables of rotations are there before."""
    ops = Alone()
    x, weights = inputs(case, dtype, dtype)
    ops.rotary_tables(TURNED, blank_batch(x.shape[0], x.shape[1]), x)
    with Made() as forward:
        y = case.compute(ops, x, weights)
    dy = values(*y.shape, seed=11).to(y.dtype)
    with Made() as backward:
        y.backward(dy)
    assert forward.tensors or not y.shape
    assert backward.tensors
    return forward.tensors + backward.tensors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_fp32_all_is_fp32(case: Case) -> None:
    assert {dtype for dtype, _ in made_by(case, torch.float32)} == {torch.float32}


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_more_than_a_piece_is_fp32(case: Case, dtype: torch.dtype) -> None:
    made = made_by(case, dtype)
    weights = {weight.numel() for weight in case.weights}
    wide = [size for one, size in made if one == torch.float32 and size not in weights]
    assert {one for one, _ in made} <= {dtype, torch.float32}
    assert max(wide, default=0) <= PIECE < min(case.x.numel(), 70 * VOCAB)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_in_fp16_nothing_overflows_that_fits(case: Case) -> None:
    exact = outcome(case, torch.float16, torch.float64, Operations())
    for ops in (Operations(), Alone()):
        for name, got in outcome(case, torch.float16, torch.float16, ops).items():
            fits = (exact[name].abs() < 65504) | torch.tensor(got.dtype != torch.float16)
            assert got[fits].isfinite().all(), (name, type(ops))
            assert error(got[fits], exact[name][fits]) < 0.01, (name, type(ops))


def test_the_slope_of_a_gate_that_is_shut_does_not_overflow() -> None:
    gate_up = torch.tensor([[-20.0, -16.0, 6e4, 6e4]], dtype=torch.float16).requires_grad_()
    dy = torch.tensor([[3e4, 3e4]], dtype=torch.float16)
    Alone().gate(gate_up, "silu").backward(dy)
    exact = gate_up.detach().double().requires_grad_()
    Operations().gate(exact, "silu").backward(dy.double())
    assert gate_up.grad is not None
    assert exact.grad is not None
    assert (dy * gate_up[:, 2:]).isinf().all()
    assert exact.grad.abs().max() < 65504
    assert error(gate_up.grad, exact.grad) < 0.01
