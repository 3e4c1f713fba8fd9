"""Measure this tree beside an earlier one of Echelon: `python -m bench.before FOLDER`.

FOLDER is a checkout of another commit (`git worktree add FOLDER COMMIT`). In each mode both engines
are alive and take turns, the first to begin changing with each round; what a round tells is the
ratio of the two turns that lie side by side. Told are the median of these ratios, and how far they
scatter: half of them lie within the two numbers in brackets. CPU seconds are those of all ranks;
they say what the engine costs where other work takes the cores. Exit 1 where a median of CPU
seconds is above `ALLOWED`, or a case does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.harness.catalogue import OURS, chosen_modes, ours
from bench.harness.interleave import Contest, end_cleanly, on_one_host, say
from bench.harness.ranks import Measurement
from bench.harness.spec import MODES, SIZES, ZERO_MODES, Mode, Size

BEFORE = "before"
ALLOWED = 1.02
"""CPU seconds of this tree over those of the earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold what a mode took in each round, in both trees; a case that did not run says why."""

    mode: Mode
    now: Sequence[Measurement]
    before: Sequence[Measurement]
    failures: Sequence[str]

    def ratios(self, quantity: str) -> list[float]:
        """Return now / before of each round, from the least to the greatest."""
        pairs = zip(self.now, self.before, strict=True)
        return sorted(getattr(now, quantity) / getattr(before, quantity) for now, before in pairs)

    @property
    def met(self) -> bool:
        """Return whether this tree costs no more than is allowed."""
        return not self.failures and statistics.median(self.ratios("cpu_s")) <= ALLOWED

    def line(self) -> str:
        """Return the line of a table."""
        if self.failures:
            return f"{self.mode.name:10} {'; '.join(self.failures)}"
        cells = [_spread(self.ratios(quantity)) for quantity in ("cpu_s", "step_s", "peak_bytes")]
        return f"{self.mode.name:10} {'  '.join(cells)}  {'' if self.met else 'MISSED'}".rstrip()


def _spread(ratios: Sequence[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.3f} {'':15}"
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{statistics.median(ratios):.3f} ({low:.3f}, {high:.3f})"


def measure(mode: Mode, size: Size, folder: Path, *, rounds: int, logs: Path) -> Change:
    """Let both trees take turns in a mode."""
    now = ours(mode)
    before = replace(now, label=BEFORE, root=folder)
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=logs, size=size)
        for case in (now, before):
            entered.enter(case, stack, on_one_host)
        for number in range(rounds):
            if entered.failures:
                break
            say(f" round {number + 1} of {rounds}")
            labels = (OURS, BEFORE) if number % 2 == 0 else (BEFORE, OURS)
            for label in labels:
                entered.keep(label, warmup=1, steps=3)
    return Change(
        mode=mode,
        now=entered.rounds.get(OURS, []),
        before=entered.rounds.get(BEFORE, []),
        failures=[f"{label}: {why}" for label, why in entered.failures.items()],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen modes and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.before", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a checkout of the commit to compare with")
    add("--modes", default=",".join((*MODES, *ZERO_MODES)), help="comma-separated: %(default)s")
    add("--size", choices=SIZES, default="quick", help="of the model (default: %(default)s)")
    add("--rounds", type=int, default=7, help="turns of both (default: %(default)s)")
    add("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    if not (folder / "bench" / "harness" / "rank.py").is_file():
        parser.error(f"{options.folder} is no checkout of Echelon: it has no bench/harness/rank.py")
    try:
        modes = chosen_modes(options.modes)
    except ValueError as error:
        parser.error(str(error))
    end_cleanly()
    logs = Path(tempfile.mkdtemp(prefix="echelon-before-"))
    print(f"this tree over {options.folder}: median (half of the rounds), {options.size}")
    print(f"{'mode':10} {'CPU seconds':20}  {'wall seconds':20}  peak memory", flush=True)
    changes: list[Change] = []
    for mode in modes:
        say(mode.name)
        taken = measure(mode, SIZES[options.size], folder, rounds=options.rounds, logs=logs)
        changes.append(taken)
        print(taken.line(), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in changes], indent=1) + "\n")
    met = sum(one.met for one in changes)
    print(f"{met} of {len(changes)} modes within {ALLOWED:.2f}x of CPU seconds")
    print(f"(load {os.getloadavg()[0]:.1f}; logs in {logs})")
    return int(met < len(changes))


if __name__ == "__main__":
    sys.exit(main())
