"""The tables of `bench.context`: what each kind took at one length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.context.spec import PLAIN_KINDS, WHOLE, Heads, label_of
from bench.harness.interleave import Contest
from bench.harness.report import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class KindResult:
    """Hold what one kind took at one length: medians of its rounds, and the facts of its ranks.

    `recorded_bytes` and `wire_bytes` are per rank and step, `allocated_bytes` and
    `resident_bytes` those of the rank that takes most, without its inputs; `error` is the worst of
    all ranks and results, as a part of the largest value there.
    """

    kind: str
    ranks: int
    heads: str
    length: int
    step_s: float
    spread: float
    cpu_s: float
    recorded_bytes: int | None
    wire_bytes: int | None
    allocated_bytes: int
    resident_bytes: int
    error: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


def read_ranks(folder: Path, name: str, num_ranks: int) -> list[dict[str, Any]]:
    """Return what each rank of a case wrote under a name."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]


def read_kind_result(
    kind: str, ranks: int, heads: Heads, length: int, entered: Contest, scratch: Path
) -> KindResult:
    """Return the figures of a kind that took its rounds."""
    label = label_of(kind, ranks)
    taken = entered.rounds[label]
    (row,) = rows({label: taken})
    facts = read_ranks(scratch / f"{kind}-{ranks}", "facts", ranks)
    recorded = taken[-1].recorded_bytes
    known = bool(recorded) and kind not in PLAIN_KINDS
    return KindResult(
        kind=kind,
        ranks=ranks,
        heads=str(heads),
        length=length,
        step_s=row.step_s,
        spread=row.spread,
        cpu_s=row.cpu_s,
        recorded_bytes=sum((recorded or {}).values()) // ranks if known else None,
        wire_bytes=None if row.sent_bytes is None else row.sent_bytes // ranks,
        allocated_bytes=max(fact["allocated_bytes"] for fact in facts),
        resident_bytes=max(fact["resident_bytes"] for fact in facts),
        error=max(
            (max(fact["errors"].values()) for fact in facts if "errors" in fact), default=None
        ),
    )


def table_lines(
    heads: Heads, length: int, told: Sequence[KindResult], failures: Mapping[str, str]
) -> Iterator[str]:
    """Yield a Markdown table: one line per kind, and why others did not run."""
    yield f"heads {heads}, {length} positions, forward and backward"
    yield ""
    yield (
        "| kind | s | spread | of one rank's | CPU s | MB sent a rank | MB on the wire a rank"
        " | allocated MB | resident MB | error |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    whole = next((one.step_s for one in told if one.kind == WHOLE), None)
    for one in told:
        part = "-" if whole is None else f"{one.step_s / whole:.2f}"
        error = "-" if one.error is None else f"{one.error:.1e}"
        yield (
            f"| {label_of(one.kind, one.ranks)} | {one.step_s:.3f} | {one.spread:.0%} | {part}"
            f" | {one.cpu_s:.3f} | {_mb(one.recorded_bytes)} | {_mb(one.wire_bytes)}"
            f" | {_mb(one.allocated_bytes)} | {_mb(one.resident_bytes)} | {error} |"
        )
    for label, reason in failures.items():
        yield f"| {label} | did not run: {reason} | | | | | | | | |"


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"
