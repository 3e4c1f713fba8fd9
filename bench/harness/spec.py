"""What is measured: the sizes of the model, the modes of splitting it, one rank's settings.

Standard library only: the controller, Echelon's ranks and the peers' ranks (another environment)
all import this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Literal

ContextKind = Literal["ring", "striped", "gathered", "ulysses", "ulysses-ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Give the shape of the Llama-like model and of the global batch."""

    name: str
    hidden: int
    ffn: int
    layers: int
    vocab: int
    sequence: int
    heads: int = 8
    kv_heads: int = 8
    global_sequences: int = 8


SIZES = {
    size.name: size
    for size in (
        Size(name="spec", hidden=512, ffn=1376, layers=8, vocab=8192, sequence=256),
        Size(name="quick", hidden=256, ffn=688, layers=4, vocab=4096, sequence=128),
        Size(name="tiny", hidden=64, ffn=176, layers=4, vocab=512, sequence=64),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Name one split: the degree of each axis, and the microbatches of a pipeline.

    Ranks are row-major over (pp, dp, cp, tp) in every framework here, so tensor neighbours are
    consecutive ranks and pipeline neighbours are farthest apart. Of the `dp` ranks that read
    different samples, each `dp_shard` consecutive ones share out what `zero_stage` says. The `cp`
    ranks hold parts of the same sequences, whose attention is of the kind `context`. A pipeline
    runs by `schedule`.
    """

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    microbatches: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    dp_shard: int = 1
    cp: int = 1
    context: ContextKind = "ring"
    ulysses_degree: int = 1
    schedule: str = "1f1b"

    @property
    def dp_replicate(self) -> int:
        """Return how many times what data ranks share out exists."""
        return self.dp // self.dp_shard

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def bubble(self) -> float:
        """Return the length of a pipelined step over its work: (m + p - 1) / m.

        Only where each rank has a core to itself: with more ranks than cores another rank
        computes in the bubble. So it is 1 for combined modes on two cores.
        """
        if self.pp == 1 or self.world_size > self.pp:
            return 1.0
        return (self.microbatches + self.pp - 1) / self.microbatches

    def limit_s(self, single_s: float, cores: int) -> float:
        """Return the least wall seconds of a step, from those of one process with one thread."""
        return single_s / min(self.world_size, cores) * self.bubble


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="dp2", dp=2),
        Mode(name="tp2", tp=2),
        Mode(name="tp2sp", tp=2, sequence_parallel=True),
        Mode(name="pp2", pp=2, microbatches=4),
        Mode(name="dp2xtp2", dp=2, tp=2),
        Mode(name="dp2xpp2", dp=2, pp=2, microbatches=4),
        Mode(name="tp2xpp2", tp=2, pp=2, microbatches=4),
    )
}
SINGLE = Mode(name="single")


def _zero_mode(stage: Literal[0, 1, 2, 3], ranks: int) -> Mode:
    return Mode(
        name=f"zero{stage}-{ranks}", dp=ranks, zero_stage=stage, dp_shard=ranks if stage else 1
    )


ZERO_MODES = {
    mode.name: mode
    for mode in (
        *(_zero_mode(stage, ranks) for ranks in (2, 4) for stage in (0, 1, 2, 3)),
        Mode(name="zero3-2x2", dp=4, zero_stage=3, dp_shard=2),
    )
}
"""Data parallelism at every ZeRO stage on 2 and 4 ranks; 2x2: two replicas, each over two ranks."""

CONTEXT_MODES = {
    mode.name: mode
    for mode in (
        Mode(name="cp2", cp=2),
        Mode(name="cp2u", cp=2, context="ulysses", ulysses_degree=2),
    )
}
"""Context parallelism on 2 ranks: a ring, and Ulysses."""

ZERO_BUBBLE_MODES = {
    mode.name: mode for mode in (Mode(name="pp2zb", pp=2, microbatches=4, schedule="zb-h1"),)
}
"""Pipelines whose weight gradients fill the bubble."""

MODULE_MODES = {
    mode.name: mode
    for mode in (
        *(MODES[name] for name in ("dp2", "tp2", "tp2sp", "pp2")),
        *ZERO_BUBBLE_MODES.values(),
        CONTEXT_MODES["cp2"],
        ZERO_MODES["zero3-2"],
    )
}
"""Each axis that cuts a module of one's own, on two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold everything that one rank of one case must know; crosses processes as JSON."""

    module: str
    variant: str
    size: Size
    mode: Mode
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 1234
    threads: int = 1
    timeout_s: int = 600

    def to_json(self) -> str:
        """Return the settings as one line of JSON.

        What a mode leaves as it is by default is not written: ranks of an earlier tree
        (`bench.before`) do not know every field.
        """
        mode = {
            field.name: value
            for field in fields(self.mode)
            if (value := getattr(self.mode, field.name)) != field.default
        }
        return json.dumps({**asdict(self), "mode": mode})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "size": Size(**data["size"]), "mode": Mode(**data["mode"])})


StepFunction = Callable[[int], float | None]
"""Run one whole optimizer step (its number is given); the local mean loss, where there is one."""


class NotApplicable(Exception):
    """A peer cannot run in this mode; the message says why."""
