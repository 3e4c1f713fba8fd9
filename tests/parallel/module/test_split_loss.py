"""The loss of columns of logits: values, gradients, and modules that need all columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from echelon.core.event import NoEvents
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.module.loss import (
    CAUSAL,
    ModuleLoss,
    SplitCausalLoss,
    SplitCrossEntropy,
    over_vocabulary,
)
from echelon.parallel.module.tensor.layers import TensorLink
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.module.tensor import split_loss_targets as targets
from tests.parallel.module.tensor.families import LENGTH, VOCAB

ALONE = Group("tp", [0], 0, None, Recorder(0, NoEvents()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_with_columns_of_padding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(6, VOCAB + 3) * 4).to(dtype).requires_grad_()
    labels = torch.tensor([0, VOCAB - 1, -100, 5, 5, -100])
    own = logits.detach().clone()
    loss: torch.Tensor = SplitCrossEntropy.apply(logits, labels, VOCAB, ALONE)
    (loss * 3).backward()
    wide = own[:, :VOCAB].to(torch.float64).requires_grad_()
    right = F.cross_entropy(wide, labels, reduction="sum")
    (right * 3).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=tolerance)
    assert logits.grad is not None
    assert wide.grad is not None
    found = logits.grad.double()
    torch.testing.assert_close(found[:, :VOCAB], wide.grad, rtol=tolerance, atol=tolerance)
    assert not found[:, VOCAB:].any()
    assert torch.equal(logits.detach(), own)


@pytest.mark.parametrize(
    "kind",
    [
        "capped",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("plain", "normed", "shifted")),
    ],
)
def test_two_ranks(rank_pool: RankPool, kind: str) -> None:
    ranks = rank_pool.run(targets.train, kind, world_size=2, timeout_s=60.0)
    loss, norm = targets.first_step(kind)
    gathers = kind in ("normed", "shifted")
    tokens = 2 * LENGTH  # of two microbatches
    for one in ranks:
        assert one.losses[0] == pytest.approx(loss, rel=1e-11)
        assert one.norms[0] == pytest.approx(norm, rel=1e-11)
        assert one.evaluated < one.losses[1] < one.losses[0]
        for sent in one.sent:
            whole = tokens * 8 * (VOCAB + 1) // 2
            assert sent.get("head.forward", 0) == (whole if gathers else 0)
            assert sent.get("loss.statistics", 0) == (0 if gathers else 3 * tokens * 8)


def test_other_losses_have_whole_logits() -> None:
    link = TensorLink(ALONE)
    assert over_vocabulary(CAUSAL, link) is CAUSAL  # nothing is split
    link.heads.append(object())  # type: ignore[arg-type]
    own: Any = ModuleLoss(sum_of=lambda output, batch: output.sum(), count_of=len)
    assert over_vocabulary(own, link) is own


class Head:
    """What a split head is to a loss: it tells of its columns, and gathers them."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1)
        self.whole_outputs = 6
        self.keeps: Any = None

    def __call__(self) -> torch.Tensor:
        """Return the columns of a rank, or all."""
        y = torch.ones(2, 3, 3, requires_grad=True) * 2.0
        if self.keeps is None:
            return self.gathered(y)
        self.keeps(y)
        return y

    def gathered(self, y: torch.Tensor) -> torch.Tensor:
        """Return the columns of two ranks."""
        return torch.cat([y, y], -1)


@pytest.mark.parametrize(
    ("work", "keeps"),
    [
        (lambda y: (y / 2.0).tanh().float() * torch.tensor(3.0), True),
        (lambda y: y[:, -1:, :].contiguous(), True),
        (lambda y: y[..., :], True),
        (lambda y: y.mul_(2.0).to(torch.float64), True),
        (lambda y: y.softmax(-1), False),
        (lambda y: y + torch.zeros(6), False),
        (lambda y: y * torch.ones(6), False),
        (lambda y: y[0, ..., :], True),
        (lambda y: y[:, 1, ...], True),
        (lambda y: y[:, :, :6], False),
        (lambda y: y[0][:, :6], False),
        (lambda y: y[0, 1][:6], False),
        (lambda y: y[0, ..., :6], False),
        (lambda y: y[0, 1, :6, ...], False),
        (lambda y: y.mT.mT.softmax(-1), False),
        (lambda y: y.log_softmax(dim=-1)[..., 0:6], False),
    ],
)
def test_columns_are_gathered_where_more_are_needed(work: Any, keeps: bool) -> None:
    head: Any = Head()
    loss = SplitCausalLoss(head, ALONE)
    whole: torch.Tensor = work(head())
    for _ in range(2):
        came: list[torch.Tensor] = []
        with loss.around():
            y = head()
            y.register_hook(came.append)  # of this tensor, as our own hooks do
            found: torch.Tensor = work(y)
        assert loss.keeps == {(True, True): keeps}
        right = whole[..., :3] if keeps else whole
        torch.testing.assert_close(found, right)
        found.sum().backward()
        assert came
        assert head.keeps is None


@pytest.mark.parametrize(
    "work",
    [
        lambda y: y / y.shape[-1] ** 0.5,
        lambda y: y / y.size(-1) ** 0.5,
        lambda y: y / y.numel(),
        lambda y: y.view(-1, y.size(-1)),
        lambda y: y.reshape(-1, y.shape[-1]),
        lambda y: y - y.data.sum(-1, keepdim=True),
        lambda y: y[0] * y[0].T.sum(),
    ],
)
def test_sizes_and_views_are_those_of_all_columns(work: Any) -> None:
    head: Any = Head()
    loss = SplitCausalLoss(head, ALONE)
    whole: torch.Tensor = work(head())
    for _ in range(2):
        with loss.around():
            found: torch.Tensor = work(head())
        assert loss.keeps == {(True, True): False}
        # In the forward that is watched, what is done to each number may still be done to columns.
        torch.testing.assert_close(found, whole[..., : found.shape[-1]])
    assert found.shape == whole.shape
