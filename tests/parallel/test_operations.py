"""The steps of a rank alone are those of one device: values and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.parallel.context import ContextAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.operations import RankOperations
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.tensor import TensorSplit
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.one_rank import alone

PLAN = plan_of(model=QWEN)
Step = Callable[[Operations, torch.Tensor], torch.Tensor]


def on_a_rank() -> RankOperations:
    groups = rank_groups(PLAN, Recorder(0, NoEvents()))
    store = GradientStore(Reduction())
    split = TensorSplit(group=groups.tensor, sequence_parallel=True, store=store)
    context = ContextAttention(PLAN, groups.ring, groups.ulysses, store)
    return RankOperations(split, QWEN.vocab, context)


def batch() -> TokenBatch:
    tokens_BT = torch.arange(6).view(2, 3)
    return TokenBatch.from_rows(tokens_BT, tokens_BT, torch.tensor([4, 5]), seed=3)


def turned(ops: Operations, x: torch.Tensor) -> torch.Tensor:
    cos_TE, sin_TE = ops.rotary_tables(QWEN, batch(), x)
    return ops.rotate(x.view(3, 2, -1, QWEN.head_dim), cos_TE, sin_TE)


STEPS: dict[str, Step] = {
    "gate": lambda ops, x: ops.gate(x, "silu"),
    "rotate": turned,
    "dropout": lambda ops, x: ops.dropout(x, 0.5, "here", batch()),
    "share": lambda ops, x: ops.share_among_heads(x),
    "silu": lambda ops, x: ops.activate(x, "silu"),
    "gelu": lambda ops, x: ops.activate(x, "gelu"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_without_weights_is_that_of_one_device(step: str) -> None:
    x = torch.randn(6, 2 * QWEN.head_dim, generator=torch.Generator().manual_seed(1)).double()
    found: list[torch.Tensor] = []
    for ops in (Operations(), on_a_rank()):
        own = x.clone().requires_grad_()
        y = STEPS[step](ops, own)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        assert own.grad is not None
        found += [y.detach(), own.grad]
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-12, atol=1e-12)


def test_tables_of_the_same_positions_are_made_once() -> None:
    ops, like = on_a_rank(), torch.zeros(1, dtype=torch.float64)
    tables = ops.rotary_tables(QWEN, batch(), like)
    assert ops.rotary_tables(QWEN, batch(), like) is tables
    assert ops.rotary_tables(QWEN, batch(), like.float()) is not tables


def test_without_a_gatherer_the_weights_are_always_there() -> None:
    ops, x = on_a_rank(), torch.zeros(2)
    assert ops.enter("layers.0", x) is x
    assert ops.leave("layers.0", x) is x


def test_a_model_of_a_rank_has_the_loss_and_gradients_of_one_device() -> None:
    model, _ = alone(PLAN)
    stage = model.stages[0]
    values = {name: one.detach().clone() for name, one in stage.named_parameters()}
    model.store.start_step()
    model.store.start_backward(last=True)
    loss = stage(None, batch(), scale=0.25)
    loss.backward()
    model.store.run_deferred()
    one_device = type(stage)(QWEN).double()
    for name, parameter in one_device.named_parameters():
        parameter.data.copy_(values[name])
    expected = one_device(None, batch(), scale=0.25)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for bucket in model.buckets:
        for slot in bucket.slots:
            wanted = one_device.get_parameter(slot.spec.name).grad
            torch.testing.assert_close(slot.gradient, wanted, rtol=0, atol=1e-12)
