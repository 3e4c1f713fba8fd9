"""Embedding and loss split over the vocabulary: padding, ignored labels, and no full logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from tests.parallel import targets
from tests.parallel.layouts import GPT2, NANO, plan_of
from tests.parallel.one_device import assemble, decoder, gradient, random_values
from tests.parallel.targets import Pass
from tests.parallel.tensor.test_tensor import close, stream, whole
from tests.parallel.vocabulary import head_targets

FOUR = replace(NANO, heads=4, kv_heads=4)
CASES = [
    (1, 37),
    (2, 37),  # one row of padding
    (4, 37),
    (4, 40),  # none
    (4, 5),  # the last rank holds padding only, the one before it half of it
    (4, 2),  # two ranks hold padding only
]


def vocabulary_plan(tp: int, vocab: int, *, scattered: bool, model: ModelShape = FOUR) -> Plan:
    """Return a plan of one microbatch of two sequences."""
    return plan_of(
        model=replace(model, vocab=vocab),
        tp=tp,
        sequence_parallel=scattered,
        microbatches=1,
        microbatch_sequences=2,
    )


def tokens(plan: Plan, *, ignored: float = 0.3) -> TokenBatch:
    """Return a batch that meets the first and the last id; a share of its labels is ignored."""
    generator = torch.Generator().manual_seed(4)
    vocab = plan.model.vocab
    ids = torch.randint(vocab, (2, 9), generator=generator)
    ids[0, 0], ids[1, 0] = vocab - 1, 0
    labels = ids[:, 1:].clone()
    labels[0, 1], labels[1, 1] = vocab - 1, 0
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED_LABEL
    return TokenBatch.from_rows(ids[:, :-1], labels, torch.arange(2))


def check_head(
    rank_pool: RankPool,
    plan: Plan,
    batch: TokenBatch,
    x_ND: torch.Tensor,
    head: Callable[[RankContext, tuple[Plan, Any, TokenBatch]], Pass] = head_targets.head,
) -> Pass:
    """Compare loss and gradients of the head with one device; return what rank 0 did."""
    ranks = rank_pool.run(head, (plan, x_ND, batch), world_size=plan.mesh.tp)
    model = decoder(plan, random_values(plan))
    x_ND = x_ND.clone().requires_grad_()
    loss = model.operations.head_loss(x_ND, model.loss_head, batch.labels_N, 0.25)
    loss.backward()
    assert x_ND.grad is not None
    for rank in ranks:
        close(rank.out, loss.detach(), "loss")
    close(whole(plan, [rank.dx for rank in ranks]), x_ND.grad, "input gradient")
    got = assemble(plan, [rank.gradients for rank in ranks])
    close(got["head.weight"], gradient(model.head_weight), "head gradient")
    return ranks[0]


@pytest.mark.quick("4-5-scattered", "4-37-scattered", "4-2-whole", "2-37-whole", "1-37-whole")
@pytest.mark.system("S15")
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize(("tp", "vocab"), CASES)
def test_the_loss_equals_that_of_one_device(
    rank_pool: RankPool, tp: int, vocab: int, scattered: bool
) -> None:
    plan = vocabulary_plan(tp, vocab, scattered=scattered)
    check_head(rank_pool, plan, tokens(plan), stream(plan, 1))


@pytest.mark.quick("4-5-scattered", "2-37-whole")
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize(("tp", "vocab"), [(1, 37), (2, 37), (4, 5), (4, 2)])
def test_capped_logits_give_the_loss_of_one_device_and_send_as_much(
    rank_pool: RankPool, tp: int, vocab: int, scattered: bool
) -> None:
    """Some logits are far beyond the cap, and no rank has a second copy of a chunk of them."""
    model = replace(FOUR, final_soft_cap=1.5)
    plan = vocabulary_plan(tp, vocab, scattered=scattered, model=model)
    free = vocabulary_plan(tp, vocab, scattered=scattered)
    for size in (0.5, 20.0):
        rank = check_head(rank_pool, plan, tokens(plan), stream(plan, 1) * size)
        other = check_head(rank_pool, free, tokens(plan), stream(plan, 1) * size)
        assert abs(float(rank.out - other.out)) > 1e-3
        assert [event.bytes for event in rank.events] == [event.bytes for event in other.events]
    check_head(rank_pool, plan, tokens(plan), stream(plan, 1), head_targets.head_in_chunks)


def test_logits_far_apart_neither_overflow_nor_vanish(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(4, 5, scattered=False)
    check_head(rank_pool, plan, tokens(plan), stream(plan, 1) * 1e3)
    check_head(rank_pool, plan, tokens(plan), stream(plan, 1) * -1e3)


def test_a_batch_without_a_counted_label_has_no_loss_and_no_gradient(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(2, 37, scattered=False)
    batch = tokens(plan, ignored=1.1)
    assert batch.num_valid() == 0
    rank = check_head(rank_pool, plan, batch, stream(plan, 1))
    assert float(rank.out) == 0.0
    assert not rank.dx.any()


@pytest.mark.quick("4-5-scattered", "2-37-whole")
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize(("tp", "vocab"), [(1, 37), (2, 37), (4, 5)])
def test_a_loss_in_chunks_is_the_same(
    rank_pool: RankPool, tp: int, vocab: int, scattered: bool
) -> None:
    plan = vocabulary_plan(tp, vocab, scattered=scattered)
    check_head(rank_pool, plan, tokens(plan), stream(plan, 1), head_targets.head_in_chunks)


@pytest.mark.system("S15")
def test_no_rank_holds_full_logits_of_any_dim(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(4, 400, scattered=False)
    rank = check_head(rank_pool, plan, tokens(plan), stream(plan, 1), head_targets.head_in_chunks)
    # Sixteen tokens, three at a time.
    assert [shape for shape in rank.saved if 100 in shape] == [(3, 100)] * 5 + [(1, 100)]
    rank = check_head(rank_pool, plan, tokens(plan), stream(plan, 1))
    assert {shape for shape in rank.saved if len(shape) > 1} == {(16, 16)}


def test_a_loss_without_gradients_is_there_at_once(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(2, 37, scattered=True)
    batch, x_ND = tokens(plan), stream(plan, 1)
    losses = rank_pool.run(head_targets.loss_alone, (plan, x_ND, batch), world_size=2)
    model = decoder(plan, random_values(plan))
    expected = model.operations.head_loss(x_ND, model.loss_head, batch.labels_N, 0.25).detach()
    for loss in losses:
        close(loss, expected, "loss")


def test_in_chunks_the_head_sends_as_much(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(4, 37, scattered=False)
    rank = check_head(rank_pool, plan, tokens(plan), stream(plan, 1), head_targets.head_in_chunks)
    sent = Counter[str]()
    for event in rank.events:
        sent[event.name] += event.bytes
    assert sent == {"head.statistics": 3 * 3 * 16 * 8, "head.backward": 2 * 3 * 16 * 16 * 8 // 4}


def test_the_head_sends_three_numbers_per_token_and_one_stream(rank_pool: RankPool) -> None:
    plan = vocabulary_plan(4, 37, scattered=False)
    rank = check_head(rank_pool, plan, tokens(plan), stream(plan, 1))
    assert [(e.kind, e.name, e.bytes) for e in rank.events] == [
        ("all_gather", "head.statistics", 3 * 3 * 16 * 8),
        ("all_reduce", "head.backward", 2 * 3 * 16 * 16 * 8 // 4),
    ]


@pytest.mark.system("S15")
@pytest.mark.quick(
    "4-5-learned-scattered", "4-37-rope-whole", "2-37-learned-scattered", "1-37-learned-scattered"
)
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize("model", [FOUR, GPT2], ids=["rope", "learned"])
@pytest.mark.parametrize(("tp", "vocab"), CASES)
def test_the_embedding_equals_that_of_one_device(
    rank_pool: RankPool, model: ModelShape, tp: int, vocab: int, scattered: bool
) -> None:
    plan = vocabulary_plan(tp, vocab, scattered=scattered, model=model)
    batch, dy_ND = tokens(plan), stream(plan, 2)
    ranks = rank_pool.run(targets.embed, (plan, dy_ND, batch), world_size=tp)
    single = decoder(plan, random_values(plan))
    learned = single.positions.weight if model is GPT2 else None
    x_ND = single.operations.embed(single.embedding.weight, learned, batch)
    x_ND.backward(dy_ND)
    close(whole(plan, [rank.out for rank in ranks]), x_ND.detach(), "output")
    got = assemble(plan, [rank.gradients for rank in ranks])
    close(got["embedding.weight"], gradient(single.embedding.weight), "embedding")
    if learned is not None:
        close(got["positions.weight"], gradient(learned), "positions")
