"""A block over tensor ranks equals the block of one device, and sends what it must, no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Recompute
from echelon.launch.local.supervisor import RankPool
from echelon.models.decoder import Block
from tests.parallel import targets
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import (
    Values,
    assemble,
    decoder,
    gradient,
    make_rows,
    random_values,
)
from tests.parallel.targets import Pass

FOUR_HEADS = replace(NANO, name="four-heads", heads=8, kv_heads=4, head_dim=2)
BIASED = replace(NANO, name="biased", qkv_bias=True, output_bias=True, mlp_bias=True, dropout=0.3)


def stream(plan: Plan, seed: int) -> torch.Tensor:
    """Return a random residual stream of one microbatch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = plan.layout.microbatch_sequences * plan.mathematics.sequence_length
    return torch.randn(tokens, plan.model.hidden, dtype=torch.float64, generator=generator)


def reference(plan: Plan) -> tuple[torch.Tensor, torch.Tensor, Values]:
    """Return output, input gradient and weight gradients of block 0 on one device."""
    model, batch = decoder(plan, random_values(plan)), make_rows(plan, 0).batch(0)
    x_ND = stream(plan, 1).requires_grad_()
    block = model.layers["0"]
    assert isinstance(block, Block)
    y_ND = block(x_ND, batch)
    y_ND.backward(stream(plan, 2))
    assert x_ND.grad is not None
    grads = {f"layers.0.{name}": gradient(one) for name, one in block.named_parameters()}
    return y_ND.detach(), x_ND.grad, grads


def run(rank_pool: RankPool, plan: Plan) -> list[Pass]:
    """Run block 0 on the tensor ranks of a plan."""
    argument = (plan, stream(plan, 1), stream(plan, 2), make_rows(plan, 0).batch(0))
    return rank_pool.run(targets.one_block, argument, world_size=plan.mesh.tp)


def whole(plan: Plan, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what ranks hold of the stream: slices one after the other, or the same on each."""
    if plan.layout.sequence_parallel:
        return torch.cat(list(pieces))
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def close(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Assert that two tensors differ by rounding only."""
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12, msg=name)


def block_plan(model: ModelShape, tp: int, *, scattered: bool) -> Plan:
    """Return a plan of one microbatch of two sequences over tensor ranks only."""
    return plan_of(
        model=model, tp=tp, sequence_parallel=scattered, microbatches=1, microbatch_sequences=2
    )


@pytest.mark.system("S13", "S14", "S29")
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize(
    ("model", "tp"),
    [(NANO, 2), (QWEN, 2), (GPT2, 2), (BIASED, 2), (FOUR_HEADS, 4), (GPT2, 4), (BIASED, 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_block_equals_that_of_one_device(
    rank_pool: RankPool, model: ModelShape, tp: int, scattered: bool
) -> None:
    plan = block_plan(model, tp, scattered=scattered)
    ranks = run(rank_pool, plan)
    y_ND, dx_ND, grads = reference(plan)
    close(whole(plan, [rank.out for rank in ranks]), y_ND, "output")
    close(whole(plan, [rank.dx for rank in ranks]), dx_ND, "input gradient")
    got = assemble(plan, [rank.gradients for rank in ranks])
    for name, expected in grads.items():
        close(got[name], expected, name)


def kinds(one: Pass) -> Counter[tuple[str, str]]:
    """Return how often each collective was called, by kind and name."""
    return Counter((event.kind, event.name) for event in one.events if event.axis == "tp")


@pytest.mark.system("S13")
def test_a_block_all_reduces_twice_forward_and_twice_backward(rank_pool: RankPool) -> None:
    for one in run(rank_pool, block_plan(NANO, 2, scattered=False)):
        assert kinds(one) == {
            ("all_reduce", "row.forward"): 2,
            ("all_reduce", "column.backward"): 2,
        }


@pytest.mark.system("S29")
def test_a_scattered_block_gathers_and_scatters_instead(rank_pool: RankPool) -> None:
    for one in run(rank_pool, block_plan(NANO, 2, scattered=True)):
        found = kinds(one)
        assert {key: n for key, n in found.items() if "gradients" not in key[1]} == {
            ("all_gather", "column.forward"): 2,
            ("reduce_scatter", "row.forward"): 2,
            ("all_gather", "column.backward.input"): 2,
            ("reduce_scatter", "column.backward"): 2,
            ("all_gather", "row.backward"): 2,
        }


def test_one_device_sends_nothing(rank_pool: RankPool) -> None:
    (alone,) = run(rank_pool, block_plan(NANO, 1, scattered=True))
    assert alone.events == []


def saved_elements(one: Pass) -> int:
    """Return the elements that autograd was given to keep."""
    return sum(int(torch.Size(shape).numel()) for shape in one.saved)


@pytest.mark.system("S29")
def test_saved_activations_fall_with_tp_and_again_with_sequence_parallelism(
    rank_pool: RankPool,
) -> None:
    plans = [
        block_plan(GPT2, 1, scattered=False),
        block_plan(GPT2, 2, scattered=False),
        block_plan(GPT2, 2, scattered=True),
    ]
    alone, split, scattered = (run(rank_pool, plan)[0] for plan in plans)
    assert saved_elements(scattered) < saved_elements(split) < saved_elements(alone)
    num_rows, hidden = 16, 16
    # The inputs of norms and of column layers are the stream: all of it, or this rank's rows.
    assert split.saved.count((num_rows, hidden)) == 4
    assert scattered.saved.count((num_rows, hidden)) == 0
    assert scattered.saved.count((num_rows // 2, hidden)) == 4
    assert saved_elements(split) - saved_elements(scattered) >= 4 * num_rows * hidden // 2


def test_recompute_keeps_the_input_only(rank_pool: RankPool) -> None:
    plan = block_plan(NANO, 2, scattered=False)
    layout = replace(plan.layout, recompute=Recompute(policy="full"))
    kept, again = run(rank_pool, plan), run(rank_pool, replace(plan, layout=layout))
    for one, other in zip(kept, again, strict=True):
        assert other.saved == [(16, 16)]
        assert torch.equal(one.out, other.out)
        assert torch.equal(one.dx, other.dx)
        for name, shards in one.gradients.items():
            assert torch.equal(shards[0].tensor, other.gradients[name][0].tensor)
        assert kinds(other)["all_reduce", "row.forward"] == 4
        assert kinds(other)["all_reduce", "column.backward"] == 2
