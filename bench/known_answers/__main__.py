"""Judge published production choices by the planner: their predicted regret, and our own choice.

`python -m bench.known_answers` runs the planner for each row of `bench/data/known_answers.csv`,
pinned to the published layout and free. Printed are predicted seconds of both, whether the
published choice fits, the measured rate as seconds of a step, and the regret: how much slower the
published choice is predicted to be than the plan that we recommend. Exit 1 where the median is
above 5 %, or a row above 20 % has no named reason; 2 where `--only` names no row.
"""

from __future__ import annotations

import argparse
import sys
import time

from bench.known_answers.answers import read_answers
from bench.known_answers.regret import Judged, judge, missed, summary, text_of


def main(words: list[str] | None = None) -> int:
    """Judge the rows, print them, and return 1 where a target is missed."""
    arguments = _parser().parse_args(words)
    rows = read_answers()
    wanted: list[str] = arguments.only or [one.name for one in rows]
    unknown = sorted(set(wanted) - {one.name for one in rows})
    if unknown:
        names = ", ".join(one.name for one in rows)
        print(f"--only {unknown[0]}: no row has this name; there are {names}", file=sys.stderr)
        return 2
    started = time.process_time()
    found: list[Judged] = []
    for row in rows:
        if row.name in wanted:
            found.append(judge(row))
            print(text_of(found[-1], terms=arguments.terms), flush=True)
    print(f"\n{summary(found)}\n{time.process_time() - started:.0f} s of CPU")
    return 1 if missed(found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.known_answers", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a row; can be repeated")
    parser.add_argument(
        "--terms", action="store_true", help="print where the seconds of both plans differ"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
