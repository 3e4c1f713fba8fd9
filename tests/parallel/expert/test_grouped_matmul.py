"""Grouped products: one launch for all experts gives what one expert after the other gives."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Precision
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.expert import grouped_matmul
from echelon.parallel.expert.feed_forward import ExpertFeedForward
from echelon.parallel.tensor import TensorSplit
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.layouts import MIXTRAL, plan_of

COUNTS = (3, 0, 5, 1, 0, 7, 2, 6)
Results = dict[str, torch.Tensor]


def computed(dtype: torch.dtype) -> Results:
    """Return outputs and gradients of the experts of a block, those without rows included."""
    names = {torch.float32: "fp32", torch.float64: "fp64"}
    precision = Precision(parameters="bf16") if dtype == torch.bfloat16 else None
    plan = plan_of(
        model=MIXTRAL,
        dtype=names.get(dtype, "fp32"),
        precision=precision,
        bucket_bytes=1 << 20,
    )
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    model = apply_plan(plan, groups, torch.device("cpu"))
    mixture = cast(MixtureOfExperts, model.stages[0].layers["0"].mlp)
    generator = torch.Generator().manual_seed(4)
    rows, hidden = sum(COUNTS), plan.model.hidden
    x, dy = (torch.randn(rows, hidden, generator=generator, dtype=dtype) for _ in range(2))
    gates = torch.rand(rows, generator=generator, dtype=dtype).requires_grad_()
    x.requires_grad_()
    model.store.start_step()
    model.store.start_backward(last=False)
    split = TensorSplit(group=groups.tensor, sequence_parallel=False, store=model.store)
    y = ExpertFeedForward.apply(x, gates, mixture.held(), COUNTS, split)
    y.backward(dy)
    model.store.run_deferred()
    assert x.grad is not None
    assert gates.grad is not None
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    weights = {
        name: slots[id(one)].gradient.clone() for name, one in mixture.experts.named_parameters()
    }
    return {"y": y.detach(), "x": x.grad, "gates": gates.grad, **weights}


def test_one_launch_gives_what_one_after_the_other_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed(torch.float32)
    launches: list[torch.Tensor] = []
    kernel: Any = grouped_matmul._GROUPED_MM  # pyright: ignore[reportPrivateUsage]

    def launch(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        launches.append(offs)
        return kernel(a, b, offs=offs)

    monkeypatch.setattr(grouped_matmul, "has_grouped_kernel", lambda _: True)
    monkeypatch.setattr(grouped_matmul, "_GROUPED_MM", launch)
    found = computed(torch.float32)
    # Forward and its transpose: each of gate and up together, and of down.
    assert len(launches) == 4
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert not found["1.gate.weight"].any()
    assert found["0.gate.weight"].any()


def test_gradients_in_fp32_are_not_rounded_to_bf16_before(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed(torch.bfloat16)
    monkeypatch.setattr(grouped_matmul, "has_grouped_kernel", lambda _: True)
    found = computed(torch.bfloat16)
    for name in ("0.down.weight", "0.gate.weight", "7.up.weight"):
        assert found[name].dtype == torch.float32
        assert not torch.equal(found[name], found[name].bfloat16().float())
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=2e-2, msg=name)
    assert not found["1.gate.weight"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_and_their_transposes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    flat = torch.randn(8 * 400, generator=generator).to(dtype)
    weight_EOI = grouped_matmul.stacked_view(
        [flat[400 * e : 400 * e + 384].view(24, 16) for e in range(8)]
    )
    assert weight_EOI is not None
    x_RI = torch.randn(sum(COUNTS), 16, generator=generator).to(dtype)
    dy_RO = torch.randn(sum(COUNTS), 24, generator=generator).to(dtype)
    ends_E = grouped_matmul.row_ends(COUNTS, x_RI.device)
    y_RO = grouped_matmul.grouped_matmul(x_RI, weight_EOI, ends_E)
    dx_RI = grouped_matmul.grouped_matmul(dy_RO, weight_EOI.transpose(1, 2), ends_E)
    tolerance = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    parts = zip(weight_EOI, x_RI.split(COUNTS), dy_RO.split(COUNTS), strict=True)
    for (w, x, dy), y, dx in zip(parts, y_RO.split(COUNTS), dx_RI.split(COUNTS), strict=True):
        for got, wanted in ((y, x @ w.t()), (dx, dy @ w)):
            torch.testing.assert_close(got, wanted, **tolerance)  # type: ignore[arg-type]


def test_what_does_not_lie_equally_far_apart_is_no_stack() -> None:
    flat = torch.zeros(4000)
    even = [flat[100 * i : 100 * i + 64].view(8, 8) for i in range(3)]
    stacked = grouped_matmul.stacked_view(even)
    assert stacked is not None
    stacked[2, 1, 3] = 5.0
    assert even[2][1, 3] == 5.0
    assert grouped_matmul.stacked_view([]) is None
    assert grouped_matmul.stacked_view([even[0], even[2], flat[300:364].view(8, 8)]) is None
    assert grouped_matmul.stacked_view([even[0], torch.zeros(8, 8)]) is None
    assert (
        grouped_matmul.stacked_view([flat[101 * i : 101 * i + 64].view(8, 8) for i in range(3)])
        is None
    )


def test_a_cpu_has_no_such_kernel() -> None:
    assert not grouped_matmul.has_grouped_kernel(torch.zeros(1, dtype=torch.bfloat16))
