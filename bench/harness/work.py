"""The multiply-adds of the parts of a step: what its compute time is shared out by.

A weight gradient and an input gradient cost as much as the forward matmul, attention's backward 2.5
times its forward; the optimizer is counted as backward, which makes the window for overlap a
little longer and forced transfer a little shorter.

Shapes: D hidden, F ffn, V vocabulary, T sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.harness.spec import Size

ELEMENT_BYTES = 4
NUM_HOSTS = 2
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Hold the multiply-adds per token of the parts of a forward pass."""

    projections: float
    attention: float
    mlp: float
    head: float
    layers: int

    @property
    def layer_forward(self) -> float:
        """Return the multiply-adds of one block forward."""
        return self.projections + self.attention + self.mlp

    @property
    def layer_backward(self) -> float:
        """Return the multiply-adds of one block backward."""
        return 2 * (self.projections + self.mlp) + _ATTENTION_BACKWARD * self.attention

    @property
    def forward(self) -> float:
        """Return the multiply-adds of the whole forward pass."""
        return self.layers * self.layer_forward + self.head

    @property
    def backward(self) -> float:
        """Return the multiply-adds of the whole backward pass."""
        return self.layers * self.layer_backward + 2 * self.head

    @property
    def step(self) -> float:
        """Return the multiply-adds of a step."""
        return self.forward + self.backward


def work_of(size: Size) -> Work:
    """Return the work of a size: q, k, v, o; causal scores and values; gate, up, down; head."""
    kv = size.hidden * size.kv_heads // size.heads
    return Work(
        projections=size.hidden * (2 * size.hidden + 2 * kv),
        attention=size.sequence * size.hidden,
        mlp=3 * size.hidden * size.ffn,
        head=size.hidden * size.vocab,
        layers=size.layers,
    )


def backward_of_block(work: Work) -> Iterable[tuple[float, float]]:
    """Yield (multiply-adds per token, weights whose gradients then exist), in backward order."""
    for _ in range(3):  # down, then up and gate
        yield 2 * work.mlp / 3, work.mlp / 3
    yield 2 * work.projections / 4, work.projections / 4
    yield _ATTENTION_BACKWARD * work.attention, 0
    for _ in range(3):  # q, k, v
        yield 2 * work.projections / 4, work.projections / 4
