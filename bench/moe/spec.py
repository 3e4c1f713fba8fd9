"""What `bench.moe` runs: one block of experts, ours over ranks and that of transformers on one.

Standard library only: the controller and the ranks import this.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bench.harness.catalogue import Case
from bench.harness.spec import Mode, Settings, Size

Maker = Literal["echelon", "grouped_mm", "eager"]
"""Echelon, or transformers with one of its two ways to run experts on a CPU."""

SEQUENCES = 4
"""Sequences of a batch: each rank of an expert group reads its part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Say who computes a block, with how many experts, and how tokens travel."""

    maker: Maker = "echelon"
    num_experts: int = 8
    top_k: int = 2
    dispatch: Literal["flat", "two-hop"] = "flat"
    chunks: int = 1
    capacity_factor: float | None = None

    def __str__(self) -> str:
        """Return the variant as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Return the variant that `str` wrote."""
        return cls(**json.loads(text))

    @property
    def label(self) -> str:
        """Return what tables call it, without its ranks and threads."""
        if self.maker != "echelon":
            return f"transformers Mixtral, {self.maker}"
        words = [self.dispatch]
        if self.capacity_factor is not None:
            words = [f"padded to {self.capacity_factor:g} x the mean"]
        return ", ".join([*words, f"{self.chunks} chunks"] if self.chunks > 1 else words)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase(Case):
    """A case whose ranks have so many threads each."""

    threads: int = 1

    def settings(self, size: Size) -> Settings:
        """Return what a rank of this case must know."""
        return replace(Case.settings(self, size), threads=self.threads)


def moe_case(variant: Variant, *, ranks: int = 1, threads: int = 1) -> MoECase:
    """Return the case of a variant over an expert group of `ranks`."""
    who = "Echelon" if variant.maker == "echelon" and ranks == 1 else variant.label
    places = f"{ranks} ranks" if ranks > 1 else f"{threads} thread{'s' * (threads > 1)}"
    return MoECase(
        label=f"{who}, {places}",
        module="bench.moe.case",
        variant=str(variant),
        mode=Mode(name=f"ep{ranks}", dp=ranks, dp_shard=ranks),
        python=Path(sys.executable),
        threads=threads,
    )


def moe_size(tokens: int, hidden: int, ffn: int) -> Size:
    """Return a model of one block, and a batch of so many tokens."""
    return Size(
        name=f"{tokens}x{hidden}x{ffn}",
        hidden=hidden,
        ffn=ffn,
        layers=1,
        vocab=64,
        sequence=tokens // SEQUENCES,
        global_sequences=SEQUENCES,
    )


def parse_size(text: str) -> Size:
    """Return the size that TOKENSxHIDDENxFFN names; ValueError where it names none."""
    parts = [int(part) for part in text.split("x")]
    if len(parts) != 3 or min(parts) < 1 or parts[0] % SEQUENCES or parts[1] % 8:
        raise ValueError(
            f"{text!r} is not TOKENSxHIDDENxFFN with {SEQUENCES} | TOKENS and 8 | HIDDEN"
        )
    return moe_size(*parts)
