"""Measure what weights take that leave and come in: `python -m bench weights`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.training.weights.memory.folders import SIZES
from tests.training.weights.memory.paths import ALLOWED_BYTES, WAYS, Line, measured

_MB = 10**6


def report(size: str, lines: Sequence[Line]) -> str:
    """Return a table, and whether each way is within slice + largest tensor + 50 MB."""
    rows = [
        "| model | way | tensors, MB | slice, MB | largest, MB | taken, MB | sampled, MB | beyond "
        "slice and largest, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in lines:
        figures = (
            one.total,
            one.held,
            one.largest,
            one.taken.own,
            one.taken.anonymous,
            one.over,
        )
        shown = " | ".join(f"{figure / _MB:.1f}" for figure in figures)
        rows.append(f"| {size} | {one.way} | {shown} |")
    worst = max(lines, key=lambda one: one.over)
    met = "met" if worst.over <= ALLOWED_BYTES else "missed"
    said = f"{worst.way}, {worst.over / _MB:.1f} MB of {ALLOWED_BYTES / _MB:.0f}: {met}"
    return "\n".join([*rows, "", f"The most beyond slice and largest tensor: {said}.", ""])


def main() -> int:
    """Measure models of some sizes; 1 where a way takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="large,wide", help=", ".join(SIZES))
    parser.add_argument("--threads", type=int, help="threads that write; one for each core")
    parser.add_argument("--ways", nargs="*", default=WAYS, help=", ".join(WAYS))
    parser.add_argument("--home", type=Path, help="where folders are made; they are removed")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each way")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    met = True
    for size in asked.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=asked.home) as home:
            lines: list[Line] = []
            for line in measured(Path(home), size, asked.threads, asked.ways):
                lines.append(line)
                print(f"{line.way}: {line.over / _MB:.1f} MB", file=sys.stderr, flush=True)
                if asked.json:
                    print(json.dumps({"size": size, "over": line.over, **asdict(line)}))
        if not asked.json:
            print(report(size, lines))
        met = met and all(line.over <= ALLOWED_BYTES for line in lines)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
