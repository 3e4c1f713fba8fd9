"""Seconds of a block on a machine that loses nothing: FLOPs over its peak, shard by shard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.seconds.block import (
    attention_seconds,
    block_seconds,
    end_seconds,
    routed_matmuls,
)
from echelon.cost.seconds.matmul import MOST_FUSED
from tests.cost.seconds.small_work import MACHINE, MIXTURE, MODEL, small_work, with_trainer

ATTENTION = 64 * (64 + 2 * 32) + 64 * 64
"""Weights of the projections."""
MLP = 64 * 2 * 128 + 128 * 64


@pytest.mark.parametrize("tp", [1.0, 2.0])
def test_a_dense_block_does_six_flops_a_weight_and_token(tp: float) -> None:
    found = block_seconds(small_work(tp=tp), mixture=False)
    each = pytest.approx(2 * 128 * (ATTENTION + MLP) / tp / 1e12)
    assert found.forward.matmul == each
    assert found.input_gradients.matmul == each
    assert found.weight_gradients == each
    assert found.forward.expert == found.forward.context == 0.0
    assert (found.forward.tensor > 0.0) == (tp > 1.0)
    assert found.forward.total == pytest.approx(found.forward.compute + found.forward.tensor)


def test_fused_attention_skips_what_the_mask_hides() -> None:
    flops = 4.0 * 128 * 64 * 64
    forward, backward = attention_seconds(small_work())
    assert (forward, backward) == pytest.approx((flops / 5e11, 2.5 * flops / 2.5e11))
    # No kernel is quicker than the best ones that are known.
    quick = replace(MACHINE, attention=1.0)
    most, _ = attention_seconds(small_work(machine=quick))
    assert most == pytest.approx(flops / (MOST_FUSED * 1e12))
    plain, _ = attention_seconds(with_trainer(small_work(), fused_attention=0.0))
    scores = 16.0 * 128 * 128 * 8 / 1e14
    assert plain == pytest.approx(2 * flops / 5e11 + scores)


def test_a_mixture_has_its_experts_one_by_one_a_router_and_shared_experts() -> None:
    work = small_work(model=MIXTURE)
    expert = 3 * 64 * 32
    routed = pytest.approx(2 * 128 * 2 * expert / 1e12)
    assert routed_matmuls(work) == (routed, routed, routed)
    found = block_seconds(work, mixture=True)
    every = ATTENTION + 64 * 8 + expert + 2 * expert
    assert found.forward.matmul == pytest.approx(2 * 128 * every / 1e12)
    # Over expert ranks there are fewer experts, each with the rows of all.
    apart, _, _ = routed_matmuls(small_work(model=MIXTURE, ep=4.0))
    assert apart == routed


def test_a_pass_takes_no_less_than_its_kernels_take_to_start() -> None:
    started = with_trainer(small_work(), host_s=1.0, kernels=3.0)
    found = block_seconds(started, mixture=False)
    assert found.forward.total == pytest.approx(3.0)
    # Where the host is the device, starting kernels adds to what they take.
    host = block_seconds(with_trainer(started, host_adds=1.0), mixture=False)
    assert host.forward.host == 3.0
    assert host.input_gradients.host == 4.5


def test_the_head_is_one_product_forward_and_two_backward() -> None:
    ends = end_seconds(with_trainer(small_work(tp=2.0), logit_bytes=0.0))
    product = 2 * 128 * 64 * 256 / 2 / 1e12
    alone = end_seconds(with_trainer(small_work(), logit_bytes=0.0))
    assert alone.head_forward == pytest.approx(2 * product)
    assert alone.head_backward == pytest.approx(4 * product)
    # Tensor ranks add up small numbers forward, the gradient of the stream backward.
    assert ends.head_forward > product
    assert ends.head_backward > 2 * product
    assert alone.embedding == pytest.approx(7 * 2 * 128 * 64 / 1e14)
    assert MODEL.tied == 0.0


def test_where_the_loss_is_computed_in_backward_its_seconds_go_there() -> None:
    usual = end_seconds(small_work(tp=2.0))
    late = end_seconds(with_trainer(small_work(tp=2.0), loss_backward=1.0))
    assert late.head_forward == 0.0
    assert late.head_weight_gradient == usual.head_weight_gradient
    moved = late.head_input_gradient - usual.head_input_gradient
    assert moved == pytest.approx(usual.head_forward)
