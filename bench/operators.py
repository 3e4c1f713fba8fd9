"""Show where the CPU seconds of a step go, side by side: `python -m bench operators --modes tp2`.

Rank 0 of Echelon and of each peer under torch's profiler; the profiler itself costs time, so read
proportions and differences, not totals.
"""

from __future__ import annotations

import argparse
import sys

from bench.harness.interleave import add_options, contest, read_options


def main() -> int:
    """Profile the chosen modes and print one table per case."""
    parser = argparse.ArgumentParser(prog="python -m bench operators", description=__doc__)
    add_options(parser, steps=2)
    parser.add_argument("--top", type=int, default=20, help="operators to show (20)")
    arguments = parser.parse_args()
    options = read_options(arguments)
    for mode in options.modes:
        with contest(options.cases(mode), logs=options.logs, size=options.size) as entered:
            for label, (group, _) in entered.groups.items():
                operators = group.profile(steps=options.steps)
                total = sum(seconds for _, _, seconds in operators)
                print(f"\n{mode.name} {label}: {total:.3f} s in operators per step, rank 0")
                for name, calls, seconds in operators[: arguments.top]:
                    print(f"  {seconds * 1e3:9.2f} ms {calls:8.1f} x  {name}")
            for label, reason in entered.failures.items():
                print(f"\n{mode.name} {label} did not run: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
