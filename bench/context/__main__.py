"""Measure attention over long sequences, split by every kind: `python -m bench.context`.

Without a further flag: one block's attention, forward and backward, by each kind on 2 and 4 ranks
beside torch's fused attention on one rank and codes written by hand; seconds, CPU seconds, bytes,
memory and error as the sequence grows. All cases of a length are alive and take turns.

    --exposed   the part of a ring's time that is exposed transfer, over free or shaped links
    --memory    peak memory of the ring, and the longest training step that fits under a limit

Exit 1 where a target is missed, 2 where a case of Echelon does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from bench.context.exposed import measure_exposed
from bench.context.memory import measure_memory
from bench.context.options import ContextOptions
from bench.context.spec import (
    DTYPES,
    OUR_KINDS,
    PLAIN_KINDS,
    WHOLE,
    Heads,
    attention_case,
    chosen_kinds,
    counts,
    fits,
    label_of,
)
from bench.context.table import KindResult, read_kind_result, table_lines
from bench.harness.interleave import Contest, end_cleanly, on_one_host, say

_LENGTHS = {
    "table": "1024,2048,4096,8192",
    "exposed": "4096,8192,16384",
    "memory": "4096,8192,16384,32768",
}
_RANKS = {"table": "2,4", "exposed": "2", "memory": "4"}


def main() -> int:
    """Measure what was asked for."""
    options = _options()
    end_cleanly()
    if options.part == "exposed":
        return measure_exposed(options)
    if options.part == "memory":
        return measure_memory(options)
    return measure_table(options)


def _options() -> ContextOptions:
    parser = argparse.ArgumentParser(prog="python -m bench.context", description=__doc__)
    add = parser.add_argument
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--exposed", dest="part", action="store_const", const="exposed")
    part.add_argument("--memory", dest="part", action="store_const", const="memory")
    parser.set_defaults(part="table")
    everything = ",".join((*OUR_KINDS, *PLAIN_KINDS))
    add("--lengths", help="positions of a sequence, comma-separated")
    add("--ranks", help="context ranks (2,4; --exposed: 2; --memory: 1,4)")
    add("--kinds", default=everything, help="default: %(default)s")
    add("--heads", default="8x8,8x2", help="QUERYxKVxDIM, DIM being 64 (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add("--rounds", type=int, default=3, help="turns of every case (default: %(default)s)")
    add("--steps", type=int, default=2, help="timed steps a turn (default: %(default)s)")
    add("--mbit", type=float, help="--exposed: the link of each rank (default: not shaped)")
    add("--limit-mib", type=float, default=200.0, help="--memory: above an idle rank (200)")
    add("--layers", type=int, default=2, help="--memory: blocks of the model (2)")
    add("--skip-fit", action="store_true", help="--memory: attention only")
    add("--json", type=Path, help="write every figure to this file")
    add("--logs", type=Path, help="folder for the output of ranks (default: a new one)")
    given = parser.parse_args()
    logs = given.logs or Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        return ContextOptions(
            part=given.part,
            lengths=counts(given.lengths or _LENGTHS[given.part]),
            ranks=counts(given.ranks or _RANKS[given.part]),
            kinds=chosen_kinds(given.kinds),
            heads=tuple(Heads.parse(text) for text in given.heads.split(",")),
            dtype=given.dtype,
            rounds=given.rounds,
            steps=given.steps,
            mbit=given.mbit,
            limit_bytes=int(given.limit_mib * 2**20),
            layers=given.layers,
            fit=not given.skip_fit,
            json=given.json,
            logs=logs.absolute(),
        )
    except ValueError as error:
        sys.exit(f"error: {error}")


def measure_table(options: ContextOptions) -> int:
    """Print one table per heads and length; return 2 where a kind of Echelon did not run."""
    results: list[KindResult] = []
    failed = False
    for heads in options.heads:
        for length in options.lengths:
            say(f"heads {heads}, {length} positions")
            entered, told = measure_length(options, heads, length)
            print("\n" + "\n".join(table_lines(heads, length, told, entered.failures)), flush=True)
            results += told
            ours = {label_of(kind, n) for kind in OUR_KINDS for n in options.ranks}
            failed = failed or bool(ours & set(entered.failures))
    if options.json is not None:
        options.json.write_text(json.dumps([one.to_json() for one in results], indent=1) + "\n")
    return 2 if failed else 0


def measure_length(
    options: ContextOptions, heads: Heads, length: int
) -> tuple[Contest, list[KindResult]]:
    """Let all kinds take turns at one length; return what they said."""
    wanted = [
        (kind, ranks)
        for ranks in options.ranks
        for kind in options.kinds
        if kind != WHOLE and fits(kind, ranks, heads)
    ]
    has_whole = WHOLE in options.kinds
    pairs = [(WHOLE, 1)] * has_whole + wanted
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="echelon-context-"))
        entered = Contest(logs=options.logs, size=heads.size(length))
        for kind, ranks in pairs:
            case = attention_case(kind, ranks, Path(scratch), check=has_whole, dtype=options.dtype)
            entered.enter(case, stack, on_one_host)
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(entered.groups):
                entered.keep(label, warmup=1, steps=options.steps)
        told = [
            read_kind_result(kind, ranks, heads, length, entered, Path(scratch))
            for kind, ranks in pairs
            if entered.rounds.get(label_of(kind, ranks))
        ]
    return entered, told


if __name__ == "__main__":
    sys.exit(main())
