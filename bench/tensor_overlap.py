"""Tensor parallelism in chunks beside gathers at once, over slow links: `python -m
bench.tensor_overlap`.

Every tensor rank is on a host of its own: a network namespace whose uplink is shaped, so that
transfer takes time but no CPU. The same model is trained under sequence parallelism with
`tp_overlap` of none and of ring; both are alive and take turns, the first to begin changing with
each round. Told are medians of seconds a step and their ratio, on free links too, where a ring has
nothing to hide and shows what chunks cost. Needs root, `ip` and `tc`. Exit 1 where the ring sends
other bytes, and, with `--below`, where no link has a ratio below that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.harness.catalogue import Case, ours
from bench.harness.hosts import Host, Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import Contest, end_cleanly, say
from bench.harness.ranks import Measurement
from bench.harness.spec import SIZES, Mode

PLAIN, RING = "at once", "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """Hold what both ways took on one link, and what the ranks said that they sent."""

    mbit: float | None
    """Megabits per second of a rank; None: not shaped."""
    plain: list[Measurement]
    ring: list[Measurement]

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the median seconds of a step: at once, in chunks."""
        plain, ring = (
            statistics.median(one.step_s for one in taken) for taken in (self.plain, self.ring)
        )
        return plain, ring

    @property
    def ratio(self) -> float:
        """Return the second over the first."""
        return self.seconds[1] / self.seconds[0]

    @property
    def same_bytes(self) -> bool:
        """Return whether both send as much over the tensor axis."""
        sent = {(one.recorded_bytes or {}).get("tp", 0) for one in (*self.plain, *self.ring)}
        return len(sent) == 1

    def line(self) -> str:
        """Return a row of the table."""
        link = "free" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        plain, ring = self.seconds
        sent = (self.ring[0].recorded_bytes or {}).get("tp", 0) / 1e6
        same = "yes" if self.same_bytes else "NO"
        return f"| {link} | {plain:.3f} | {ring:.3f} | {self.ratio:.3f} | {sent:.1f} | {same} |"


def main() -> int:
    """Measure on every link; print the table and the verdict."""
    options = _options()
    if not can_make_namespaces():
        print("error: shaped links need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    links = [None, *(float(text) for text in options.mbit.split(","))]
    results = measure(options, links)
    if results is None:
        return 2
    print(
        f"\n{options.size}, tp {options.ranks}, {options.rounds} rounds of {options.steps} steps,"
        f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
    )
    print("| link of a rank | at once, s | ring, s | ratio | MB all ranks send | same bytes |")
    print("|---|---|---|---|---|---|")
    print("\n".join(one.line() for one in results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    below = min(one.ratio for one in results)
    met = options.below is None or below < options.below
    if options.below is not None:
        word = "met" if met else "MISSED"
        print(f"\nbest ratio {below:.3f}, target < {options.below:.2f}: {word}")
    return int(not (met and all(one.same_bytes for one in results)))


def measure(options: argparse.Namespace, links: Sequence[float | None]) -> list[LinkResult] | None:
    """Let both ways take turns on every link; None where one does not run."""
    mode = Mode(name=f"tp{options.ranks}sp", tp=options.ranks, sequence_parallel=True)
    cases = {PLAIN: mode, RING: replace(mode, tp_overlap="ring")}
    size = replace(SIZES[options.size], global_sequences=options.sequences)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    found = [LinkResult(mbit=mbit, plain=[], ring=[]) for mbit in links]
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=logs.absolute(), size=size)

        @contextlib.contextmanager
        def hosts() -> Iterator[Sequence[Host]]:
            with linked_hosts(options.ranks) as made:
                yield made

        for label, one in cases.items():
            entered.enter(_case(label, one), stack, hosts)
        for number in range(options.rounds):
            for result in found:
                say(f" round {number + 1} of {options.rounds}, {result.mbit or 'free'}")
                for label in list(cases)[:: 1 if number % 2 else -1]:
                    taken = _turn(entered, label, result.mbit, options.steps)
                    if taken is None:
                        return None
                    (result.plain if label == PLAIN else result.ring).append(taken)
    return found


def _case(label: str, mode: Mode) -> Case:
    return replace(ours(mode), label=label)


def _turn(entered: Contest, label: str, mbit: float | None, steps: int) -> Measurement | None:
    if label not in entered.groups:
        print(f"{label}: {entered.failures.get(label, 'it did not run')}", file=sys.stderr)
        return None
    for host in entered.groups[label][1]:
        host.shape(None if mbit is None else Link(bits_per_s=mbit * 1e6))
    return entered.turn(label, warmup=1, steps=steps)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_overlap", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="tensor ranks, each on a host (default: %(default)s)")
    add("--mbit", default="100,200,400", help="links, comma-separated (default: %(default)s)")
    add("--size", choices=SIZES, default="spec", help="size of the model (default: %(default)s)")
    add("--sequences", type=int, default=4, help="of a step, one microbatch (%(default)s)")
    add("--rounds", type=int, default=5, help="turns on every link (default: %(default)s)")
    add("--steps", type=int, default=2, help="timed steps a turn (default: %(default)s)")
    add("--below", type=float, help="the ratio that some link must be below")
    add("--json", type=Path, help="write every measurement to this file")
    add("--logs", type=Path, help="folder for the output of ranks (default: a new one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
