"""Activations on the host: they leave the device, come back bit for bit, memory is used again."""

from __future__ import annotations

import gc
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from echelon.core.plan import Recompute
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.recompute import HostActivations, OperatorRecompute, RecomputingRunner
from tests.parallel.layouts import NANO
from tests.parallel.offload.lazy_copy_streams import LazyCopyStreams, LazyEvent


def make_decoder(recompute: Recompute) -> tuple[Decoder, HostActivations | None]:
    """Return a small decoder with weights, and where the inputs of its blocks wait."""
    torch.manual_seed(3)
    decoder = Decoder(NANO)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    runner = RecomputingRunner(recompute, OperatorRecompute())
    decoder.run_block = runner
    return decoder, runner.host


def make_batch(seed: int) -> TokenBatch:
    """Return two sequences of eight tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, NANO.vocab, (2, 8), generator=generator)
    return TokenBatch.from_rows(tokens, tokens, torch.arange(2))


INPUT_BYTES = 2 * 8 * NANO.hidden * 4


def test_inputs_leave_the_device_and_their_memory_is_used_again() -> None:
    decoder, host = make_decoder(Recompute(policy="full", every=2, offload="host"))
    assert host is not None
    for step in range(3):
        one, two = (decoder(None, make_batch(seed)) for seed in (step, step + 1))
        assert host.stored_bytes == 2 * 2 * INPUT_BYTES
        two.backward()
        assert host.stored_bytes == 2 * INPUT_BYTES
        one.backward()
        assert host.stored_bytes == 0
    assert host.peak_stored_bytes == 4 * INPUT_BYTES
    assert host.allocated_bytes == 4 * INPUT_BYTES
    with torch.no_grad():
        decoder(None, make_batch(0))
    assert host.allocated_bytes == 4 * INPUT_BYTES


def kept_by_blocks(loss: torch.Tensor) -> list[int]:
    """Return the bytes that each recomputed block of a graph keeps on the device."""
    nodes: dict[Any, None] = {loss.grad_fn: None}
    for node in (reached := list(nodes)):
        following = [after for after, _ in node.next_functions if after not in (None, *nodes)]
        nodes.update(dict.fromkeys(following))
        reached += following
    blocks = [node for node in nodes if "RecomputedBlock" in node.name()]
    return [sum(tensor.nbytes for tensor in node.saved_tensors) for node in blocks]


def test_blocks_keep_nothing_on_the_device_where_inputs_wait_on_the_host() -> None:
    for recompute, kept in (
        (Recompute(policy="full"), INPUT_BYTES),
        (Recompute(policy="full", offload="host"), 0),
    ):
        decoder, _ = make_decoder(recompute)
        assert kept_by_blocks(decoder(None, make_batch(0))) == [kept] * NANO.layers


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    decoder, host = make_decoder(Recompute(policy="full", offload="host"))
    assert host is not None
    for _ in range(3):
        loss = decoder(None, make_batch(0))
        assert host.stored_bytes == NANO.layers * INPUT_BYTES
        del loss
        gc.collect()
        assert host.stored_bytes == 0
    assert host.allocated_bytes == NANO.layers * INPUT_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_stored_tensors_come_back_whatever_order_a_gpu_copies_in(seed: int) -> None:
    random, lanes = Random(seed), LazyCopyStreams(seed)
    host = HostActivations(lambda _: lanes)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        passes = [object() for _ in range(3)]
        stored = []
        for of in passes:
            for layer in range(4):
                x = torch.empty(33)
                number = float(100 * step + 10 * len(stored) + layer)
                lanes.compute(partial(x.fill_, number))
                stored.append((host.store(x, of), number, of))
                copied = stored[-1][0].copied
                assert isinstance(copied, LazyEvent)
                if random.random() < 0.3:
                    # The next block may be computed in the memory of its input once it is copied.
                    lanes.compute(partial(x.fill_, -1.0), [copied])
        random.shuffle(passes)
        for of in passes:
            mine = [entry for entry in stored if entry[2] is of]
            if random.random() < 0.2:
                # A graph that is dropped when its backward has come half-way.
                mine = mine[2:]
            for index, (kept, number, _) in reversed([*enumerate(mine)]):
                back = kept.take()
                assert index == 0 or mine[index - 1][0].brought is not None
                wanted = torch.full((33,), number)
                lanes.compute(lambda b=back, w=wanted: seen.append((b.clone(), w)))
    lanes.compute(lambda: None).synchronize()
    assert len(seen) >= 4 * 3 * 2
    assert all(torch.equal(there, wanted) for there, wanted in seen)
