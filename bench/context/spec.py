"""What `python -m bench context` runs: attention of one block, by kind, over context ranks.

Standard library only: the controller and the ranks import this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

from bench.harness.catalogue import Case
from bench.harness.spec import ContextKind, Mode, Size

OUR_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
WHOLE = "whole"
"""torch's fused attention over the whole sequence on one rank."""
PLAIN_KINDS: Mapping[str, str] = MappingProxyType(
    {
        WHOLE: "torch SDPA, one rank",
        "plain-ulysses": "Ulysses by hand",
        "plain-ring": "ring by hand",
        "plain-ring-blocking": "ring by hand, blocking",
        "torch": "torch context_parallel",
    }
)
"""What Echelon is set beside, and its name in tables."""
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Give the heads of an attention; written as QUERYxKV, with DIM as in 8x2x64."""

    query: int
    kv: int
    dim: int = 64

    def __str__(self) -> str:
        """Return the heads as `parse` reads them."""
        return f"{self.query}x{self.kv}x{self.dim}"

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Return the heads that a text names; ValueError where it names none."""
        counts = [int(part) for part in text.split("x")]
        if len(counts) not in (2, 3) or min(counts) < 1 or counts[0] % counts[1]:
            raise ValueError(f"heads are QUERYxKV or QUERYxKVxDIM with KV a divisor, not {text!r}")
        return cls(query=counts[0], kv=counts[1], dim=counts[2] if len(counts) > 2 else 64)

    def size(self, length: int) -> Size:
        """Return one block with these heads, and one sequence of `length` positions."""
        hidden = self.query * self.dim
        return Size(
            name=f"{self}-{length}",
            hidden=hidden,
            ffn=hidden,
            layers=1,
            vocab=256,
            sequence=length,
            heads=self.query,
            kv_heads=self.kv,
            global_sequences=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """Say what a rank computes and where it writes; crosses processes as a `Case.variant`.

    `folder` takes a rank's facts and its turns. `reference` is the folder of the values that all
    are compared with: the case "whole" writes them, the others read; "" for no comparison.
    """

    kind: str
    folder: str
    reference: str = ""
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return the variant as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> AttentionVariant:
        """Return the variant that `str` wrote."""
        return cls(**json.loads(text))


def label_of(kind: str, ranks: int) -> str:
    """Return how tables name a kind."""
    if kind == WHOLE:
        return PLAIN_KINDS[kind]
    if kind in PLAIN_KINDS:
        return f"{PLAIN_KINDS[kind]}, {ranks} ranks"
    return f"{kind}, {ranks} ranks"


def context_mode(kind: str, ranks: int) -> Mode:
    """Return the split of a kind over context ranks."""
    if kind == WHOLE:
        return Mode(name=WHOLE)
    if kind not in OUR_KINDS:
        return Mode(name=f"cp{ranks}-{kind}", cp=ranks)
    degree = {"ulysses": ranks, "ulysses-ring": 2}.get(kind, 1)
    return Mode(
        name=f"cp{ranks}-{kind}",
        cp=ranks,
        context=cast("ContextKind", kind),
        ulysses_degree=degree,
    )


def attention_case(kind: str, ranks: int, folder: Path, *, check: bool, dtype: str) -> Case:
    """Return the case of a kind, in the environment that runs this; it writes into `folder`."""
    own = folder / f"{kind}-{ranks}"
    own.mkdir(parents=True, exist_ok=True)
    variant = AttentionVariant(
        kind=kind, folder=str(own), reference=str(folder) if check else "", dtype=dtype
    )
    return Case(
        label=label_of(kind, ranks),
        module="bench.context.attention_case",
        variant=str(variant),
        mode=context_mode(kind, ranks),
        python=Path(sys.executable),
    )


def fits(kind: str, ranks: int, heads: Heads) -> bool:
    """Return whether a kind can run over so many ranks, and is no other kind by another name."""
    if kind == "ulysses-ring":
        return ranks > 2 and heads.query % 2 == 0
    return "ulysses" not in kind or heads.query % ranks == 0


def chosen_kinds(names: str) -> tuple[str, ...]:
    """The kinds of a comma-separated list; ValueError names an unknown one."""
    known = (*OUR_KINDS, *PLAIN_KINDS)
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"unknown kinds {unknown}; known: {', '.join(known)}")
    return wanted
