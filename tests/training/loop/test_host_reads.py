"""Where the host reads what the device computes: each such read waits for the whole device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.event import NoEvents
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from tests.parallel.layouts import DEEPSEEK, QWEN, plan_of
from tests.parallel.one_device import make_rows

TOKENS, SUMS, LOADS = "the number of tokens", "the sums of all ranks", "the loads of experts"
LAUNCHED, ROWS = "all work is launched", "the rows of experts"
NUM_MICROBATCHES = 3
EXPERT_BLOCKS = sum(DEEPSEEK.layer_has_experts(layer) for layer in range(DEEPSEEK.layers))


class Reads(TorchDispatchMode):
    """Note, in order, which reads of numbers are marked and which are not."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.marked = ""
        self.found: list[str] = []

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Note a read that is marked."""
        self.found.append(what)
        self.marked = what
        try:
            yield
        finally:
            self.marked = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a read that is not."""
        if func is torch.ops.aten._local_scalar_dense.default and not self.marked:
            self.found.append("a number")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (QWEN, [TOKENS, LAUNCHED, SUMS]),
        (DEEPSEEK, [TOKENS, *[ROWS] * (EXPERT_BLOCKS * NUM_MICROBATCHES), LAUNCHED, LOADS]),
    ],
)
def test_a_step_reads_only_what_it_must(
    model: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TrainEngine(
        plan_of(model=model, microbatches=NUM_MICROBATCHES),
        Recorder(0, NoEvents()),
        torch.device("cpu"),
    )
    rows = make_rows(engine.plan, 0)
    batches = rank_batches(engine.plan, rows, engine.data_rank, 0)
    batches = [one.moved(one.tensors()) for one in batches]
    reads = Reads()
    monkeypatch.setattr(Recorder, "reading", reads.reading)
    engine.on_launched = lambda: reads.found.append(LAUNCHED)
    with reads:
        engine.step(batches, 0)
    # Behind the last of them the host has all of it, and reads its own memory.
    assert reads.found[: len(expected)] == expected
    assert reads.found.count(SUMS) == 1
    reads.found.clear()
    with reads:
        engine.evaluate(batches)
    # The sizes of what experts exchange are all that is read between.
    assert [one for one in reads.found if one != ROWS][:2] == [TOKENS, SUMS]
