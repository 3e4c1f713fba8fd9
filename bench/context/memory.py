"""What memory a ring takes as the sequence grows, and how long a sequence fits because of it.

What fits is judged by resident memory. The C library keeps freed blocks of up to 32 MB for itself
and cannot always use them again: with tensors of that size resident memory is a third more than
what is in use, and how much depends on their sizes, not on the split. So all ranks of this part,
one or four, give back what they free (`MALLOC_MMAP_THRESHOLD_`).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.context.options import ContextOptions
from bench.context.spec import FitVariant, Heads, attention_case, context_mode
from bench.context.table import read_ranks
from bench.harness.catalogue import Case
from bench.harness.hosts import one_host
from bench.harness.interleave import say
from bench.harness.ranks import CaseFailed, RankGroup
from bench.harness.spec import Size

EVEN_TARGET = 1.10
"""How far the memory per position of a rank may differ between lengths."""
FIT_TARGET, FIT_RANKS = 3.5, 4
MAPPED_FROM_BYTES = 2**18
UNIT = 256
RESOLUTION = 0.02
FIRST_LENGTH = 2048
SMALL_FACTOR = 1.2
"""How far to go at a time where the target tells about where to look: long tries are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Hold the peak memory of one attention, forward and backward, without its inputs."""

    heads: str
    ranks: int
    length: int
    allocated_bytes: int
    resident_bytes: int

    @property
    def per_position(self) -> float:
        """Return the allocated bytes for each position of a rank."""
        return self.allocated_bytes / (self.length / self.ranks)


def measure_memory(options: ContextOptions) -> int:
    """Print both parts; return 1 where a target is missed."""
    missed = False
    peaks: list[Peak] = []
    for heads in options.heads:
        found = [
            _peak(options, heads, ranks, length)
            for ranks in sorted({1, *options.ranks})
            for length in options.lengths
        ]
        peaks += found
        missed = _tell_peaks(heads, found) or missed
    longest: dict[int, int] = {}
    if options.fit:
        longest = _longest(options)
        ratio = longest[FIT_RANKS] / longest[1]
        missed = missed or ratio < FIT_TARGET
        word = "met" if ratio >= FIT_TARGET else "MISSED"
        print(
            f"longest training step within {options.limit_bytes / 2**20:g} MiB above an idle rank:"
            f" {longest[1]} positions on 1 rank, {longest[FIT_RANKS]} on {FIT_RANKS}"
            f" = {ratio:.2f}x, target >= {FIT_TARGET:.1f}x: {word}"
        )
    if options.json is not None:
        told: dict[str, Any] = {"peaks": [asdict(one) for one in peaks], "longest": longest}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(missed)


def _peak(options: ContextOptions, heads: Heads, ranks: int, length: int) -> Peak:
    """Return the peak of the ring over so many ranks, each in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="echelon-context-") as scratch:
        case = attention_case("ring", ranks, Path(scratch), check=False, dtype=options.dtype)
        _run(case, heads.size(length), options.logs, steps=1)
        facts = read_ranks(Path(scratch) / f"ring-{ranks}", "facts", ranks)
    say(f" ring over {ranks}, {length} positions")
    return Peak(
        heads=str(heads),
        ranks=ranks,
        length=length,
        allocated_bytes=max(fact["allocated_bytes"] for fact in facts),
        resident_bytes=max(fact["resident_bytes"] for fact in facts),
    )


def _tell_peaks(heads: Heads, peaks: Sequence[Peak]) -> bool:
    """Print the table of some heads; return whether memory does not grow as length over ranks."""
    print(f"\nring, heads {heads}: peak memory of attention, forward and backward\n")
    print("| ranks | positions | allocated MB | bytes a position of a rank | resident MB |")
    print("|---|---|---|---|---|")
    for one in peaks:
        print(
            f"| {one.ranks} | {one.length} | {one.allocated_bytes / 1e6:.1f}"
            f" | {one.per_position:.0f} | {one.resident_bytes / 1e6:.1f} |"
        )
    missed = False
    for ranks in sorted({one.ranks for one in peaks} - {1}):
        uneven = unevenness(one for one in peaks if one.ranks == ranks)
        missed = missed or uneven > EVEN_TARGET
        word = "met" if uneven <= EVEN_TARGET else "MISSED"
        print(
            f"{ranks} ranks: bytes a position differ by {uneven:.3f}x between lengths,"
            f" target <= {EVEN_TARGET:.2f}x: {word}"
        )
    sys.stdout.flush()
    return missed


def unevenness(peaks: Iterable[Peak]) -> float:
    """Return the most bytes per position over the least; 1 where memory grows as the length."""
    each = [one.per_position for one in peaks]
    return max(each) / min(each)


def _longest(options: ContextOptions) -> dict[int, int]:
    """Return the longest sequence that fits, by number of ranks."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED_FROM_BYTES)
    found: dict[int, int] = {}
    first, factor = FIRST_LENGTH, 2.0
    for ranks in (1, FIT_RANKS):

        def fits(length: int, ranks: int = ranks) -> bool:
            return _fits(options, ranks, length)

        found[ranks] = longest_that_fits(fits, first, factor=factor)
        first, factor = math.ceil(found[ranks] * FIT_TARGET / UNIT) * UNIT, SMALL_FACTOR
        say(f" {ranks} ranks: {found[ranks]} positions")
    return found


def longest_that_fits(fits: Callable[[int], bool], first: int, *, factor: float = 2.0) -> int:
    """Return the longest length that fits, within `RESOLUTION`: `factor` by factor, then by halves.

    Lengths are multiples of `UNIT`, over which every placement here can be cut.
    """
    low, high = 0, 0
    length = first
    while not (low and high):
        if fits(length):
            low = length
            length = math.ceil(low * factor / UNIT) * UNIT
        else:
            high = length
            length = int(high / factor / UNIT) * UNIT
            if not length:
                raise ValueError(f"not even {high} positions fit: give a higher --limit-mib")
    while high - low > max(UNIT, RESOLUTION * low):
        middle = (low + high) // 2 // UNIT * UNIT
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(options: ContextOptions, ranks: int, length: int) -> bool:
    """Try a training step in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="echelon-context-") as scratch:
        folder = Path(scratch)
        variant = FitVariant(limit_bytes=options.limit_bytes, folder=scratch)
        case = Case(
            label=f"fit {ranks} {length}",
            module="bench.context.fit_case",
            variant=str(variant),
            mode=context_mode("ring", ranks),
            python=Path(sys.executable),
        )
        try:
            _run(case, _nano(options.layers, length), options.logs, steps=2)
        except CaseFailed:
            if not list(folder.glob("over-*")):
                raise
        over = bool(list(folder.glob("over-*")))
        grown = [] if over else [one["grown_bytes"] for one in read_ranks(folder, "grown", ranks)]
    told = "over" if over else f"{max(grown) / 2**20:.0f} MiB"
    say(f" {ranks} ranks, {length} positions: {told}")
    return not over and max(grown) <= options.limit_bytes


def _nano(layers: int, length: int) -> Size:
    """Return a model like the preset "nano" of some blocks, and one sequence."""
    return Size(
        name=f"nano-{layers}-{length}",
        hidden=128,
        ffn=352,
        layers=layers,
        vocab=257,
        sequence=length,
        heads=4,
        kv_heads=2,
        global_sequences=1,
    )


def _run(case: Case, size: Size, logs: Path, *, steps: int) -> None:
    with one_host() as host, RankGroup(case, case.settings(size), [host], logs) as group:
        group.run(warmup=0, steps=steps)
