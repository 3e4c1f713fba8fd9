"""What passes is seen by hooks that are taken off; what is recomputed is not seen again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from echelon.proof.evidence.run import CountedTokens
from echelon.proof.verify import watch as watching
from echelon.proof.verify.watch import PassingWatch
from tests.proof.causes.passing.passes import CLASSES, IGNORED, Layers, batch, one_device


def test_outputs_gradients_and_labels_are_seen() -> None:
    passed = one_device().passed
    told = [(one.name, one.gradient, one.source) for one in passed.tensors]
    forward = [("first", False, ""), ("second", False, "first"), ("last", False, "second")]
    assert told == [
        ("first (input)", False, ""),
        *forward,
        ("last", True, ""),
        ("second", True, ""),
        ("first", True, ""),
    ]
    (tokens,) = passed.tokens
    assert (tokens.num_classes, tokens.labels_n.numel(), tokens.ignored) == (CLASSES, 24, IGNORED)
    x_BTI, labels_BT = batch()
    torch.manual_seed(3)
    loss = fn.cross_entropy(Layers().double()(x_BTI).flatten(0, 1), labels_BT.flatten())
    torch.testing.assert_close(tokens.token_losses().mean(), loss.detach())
    fewer = CountedTokens(
        step=0, labels_n=torch.tensor([0]), num_classes=2, ignored=-100, logits_nV=torch.eye(2)[:1]
    )
    assert float(fewer.token_losses(1)) == 0.0


def test_nothing_stays_hooked_or_patched() -> None:
    model, plain = Layers(), fn.cross_entropy
    watch = PassingWatch(model.named_children(), lambda: 0)
    with watch.hooks():
        assert fn.cross_entropy is not plain
    assert fn.cross_entropy is plain
    assert [len(module._forward_hooks) for module in model.modules()] == [0, 0, 0, 0]
    model(torch.zeros(1, 1, 5))
    assert watch.passed.tensors == []


def test_a_recomputed_pass_is_no_new_one() -> None:
    model = Layers()
    watch = PassingWatch(model.named_children(), lambda: 2)
    with watch.hooks():
        checkpoint(model, torch.ones(1, 1, 5), use_reentrant=False).sum().backward()
        model(torch.ones(1, 1, 5))
    told = [(one.step, one.name, one.call) for one in watch.passed.tensors if not one.gradient]
    names = ("first (input)", "first", "second", "last")
    assert told == [(2, name, call) for call in range(2) for name in names]
    assert sum(one.gradient for one in watch.passed.tensors) == 3


def test_what_attention_is_called_with_is_seen() -> None:
    q, k = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 5, 6)
    plain = fn.scaled_dot_product_attention
    watch = PassingWatch([], lambda: 1)
    with watch.hooks():
        fn.scaled_dot_product_attention(q, q, q, is_causal=True)
        narrow = torch.zeros(3, 5).masked_fill(torch.ones(3, 5).triu(1) > 0, -torch.inf)
        fn.scaled_dot_product_attention(q, k, k, attn_mask=narrow, scale=2.0, enable_gqa=True)
        fn.scaled_dot_product_attention(q[0], q[0], q[0])
    assert fn.scaled_dot_product_attention is plain
    causal, masked = watch.passed.attention
    assert causal.scale == pytest.approx(6**-0.5)
    assert torch.equal(causal.allowed, torch.ones(3, 3).tril().bool())
    assert (masked.step, masked.scale, tuple(masked.k_BHSd.shape)) == (1, 2.0, (2, 2, 5, 6))
    assert torch.equal(masked.allowed, torch.ones(3, 5).tril().bool())


def test_labels_of_other_losses_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = PassingWatch([], lambda: 0)
    with watch.hooks():
        fn.cross_entropy(torch.zeros(2, 3), torch.full((2, 3), 1 / 3))
        nn.CrossEntropyLoss()(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))
    (one,) = watch.passed.tokens
    assert one.logits_nV is not None
    assert (one.num_classes, tuple(one.logits_nV.shape)) == (3, (8, 3))
    monkeypatch.setattr(watching, "MOST_BYTES", 10)
    full = PassingWatch([], lambda: 0)
    with full.hooks():
        fn.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    assert full.passed.tokens == []
