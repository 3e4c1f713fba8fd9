"""Measure attention over long sequences, split by every kind: `python -m bench context`.

One block's attention, forward and backward, by each kind on 2 and 4 ranks beside torch's fused
attention on one rank and codes written by hand; seconds, CPU seconds, bytes, memory and error as
the sequence grows. All cases of a length are alive and take turns. Exit 2 where a case of Echelon
does not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.context.spec import (
    DTYPES,
    OUR_KINDS,
    PLAIN_KINDS,
    WHOLE,
    Heads,
    attention_case,
    chosen_kinds,
    fits,
    label_of,
)
from bench.harness.interleave import Contest, add_turns, contest, end_cleanly, logs_folder, say
from bench.harness.report import markdown, megabytes, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Hold what the command line says."""

    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    heads: tuple[Heads, ...]
    dtype: str
    rounds: int
    steps: int
    json: Path | None
    logs: Path


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


def main() -> int:
    """Print one table per heads and length; 2 where a kind of Echelon did not run."""
    options = _options()
    end_cleanly()
    results: list[KindResult] = []
    failed = False
    ours = {label_of(kind, n) for kind in OUR_KINDS for n in options.ranks}
    for heads in options.heads:
        for length in options.lengths:
            say(f"heads {heads}, {length} positions")
            entered, told = measure_length(options, heads, length)
            print(f"\nheads {heads}, {length} positions, forward and backward\n")
            print(table(told, entered.failures), flush=True)
            results += told
            failed = failed or bool(ours & set(entered.failures))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return 2 if failed else 0


def _options() -> ContextOptions:
    parser = argparse.ArgumentParser(prog="python -m bench context", description=__doc__)
    add = parser.add_argument
    everything = ",".join((*OUR_KINDS, *PLAIN_KINDS))
    add("--lengths", type=_counts, default="1024,2048,4096,8192", help="positions (%(default)s)")
    add("--ranks", type=_counts, default="2,4", help="context ranks (%(default)s)")
    add("--kinds", default=everything, help="default: %(default)s")
    add("--heads", default="8x8,8x2", help="QUERYxKVxDIM, DIM being 64 (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add_turns(parser, steps=2)
    given = parser.parse_args()
    try:
        kinds = chosen_kinds(given.kinds)
        heads = tuple(Heads.parse(text) for text in given.heads.split(","))
    except ValueError as error:
        parser.error(str(error))
    told = {**vars(given), "kinds": kinds, "heads": heads, "logs": logs_folder(given.logs)}
    return ContextOptions(**told)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def measure_length(
    options: ContextOptions, heads: Heads, length: int
) -> tuple[Contest, list[KindResult]]:
    """Let all kinds take turns at one length; also what they said."""
    has_whole = WHOLE in options.kinds
    pairs = [(WHOLE, 1)] * has_whole + [
        (kind, ranks)
        for ranks in options.ranks
        for kind in options.kinds
        if kind != WHOLE and fits(kind, ranks, heads)
    ]
    with tempfile.TemporaryDirectory(prefix="echelon-context-") as folder:
        cases = [
            attention_case(kind, ranks, Path(folder), check=has_whole, dtype=options.dtype)
            for kind, ranks in pairs
        ]
        with contest(cases, logs=options.logs, size=heads.size(length)) as entered:
            entered.take_rounds(options.rounds, warmup=1, steps=options.steps)
            told = [
                _result(kind, ranks, heads, length, entered, Path(folder))
                for kind, ranks in pairs
                if entered.rounds.get(label_of(kind, ranks))
            ]
    return entered, told


def _result(
    kind: str, ranks: int, heads: Heads, length: int, entered: Contest, scratch: Path
) -> KindResult:
    """The figures of a kind that took its rounds."""
    label = label_of(kind, ranks)
    (row,) = rows({label: entered.rounds[label]})
    files = (scratch / f"{kind}-{ranks}" / f"facts-{rank}.json" for rank in range(ranks))
    facts = [json.loads(file.read_text()) for file in files]
    known = bool(row.said_bytes) and kind not in PLAIN_KINDS
    return KindResult(
        kind=kind,
        ranks=ranks,
        heads=str(heads),
        length=length,
        step_s=row.step_s,
        spread=row.spread,
        cpu_s=row.cpu_s,
        recorded_bytes=(row.said_bytes or 0) // ranks if known else None,
        wire_bytes=None if row.sent_bytes is None else row.sent_bytes // ranks,
        allocated_bytes=max(fact["allocated_bytes"] for fact in facts),
        resident_bytes=max(fact["resident_bytes"] for fact in facts),
        error=max(
            (max(fact["errors"].values()) for fact in facts if "errors" in fact), default=None
        ),
    )


def table(told: Sequence[KindResult], failures: Mapping[str, str]) -> str:
    """A Markdown table: one line per kind, and why others did not run."""
    head = (
        *("kind", "s", "spread", "of one rank's", "CPU s", "MB sent a rank"),
        *("MB on the wire a rank", "allocated MB", "resident MB", "error"),
    )
    whole = next((one.step_s for one in told if one.kind == WHOLE), None)
    lines = [
        [
            *(label_of(one.kind, one.ranks), f"{one.step_s:.3f}", f"{one.spread:.0%}"),
            *("-" if whole is None else f"{one.step_s / whole:.2f}", f"{one.cpu_s:.3f}"),
            *(megabytes(one.recorded_bytes), megabytes(one.wire_bytes)),
            *(megabytes(one.allocated_bytes), megabytes(one.resident_bytes)),
            "-" if one.error is None else f"{one.error:.1e}",
        ]
        for one in told
    ]
    lines += [[label, f"did not run: {reason}"] for label, reason in failures.items()]
    return markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
