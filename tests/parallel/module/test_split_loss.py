"""The loss of columns of logits: values, gradients, and modules that need all columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from echelon.core.event import NoEvents
from echelon.launch.local.pool import RankPool
from echelon.parallel.module.loss import CAUSAL, ModuleLoss
from echelon.parallel.module.split_loss import SplitCrossEntropy, over_vocabulary
from echelon.parallel.module.tensor.layers import TensorLink
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.module import split_loss_targets as targets
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
