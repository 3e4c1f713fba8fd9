"""Compare the bytes that cross the wire with those that Echelon records: `python -m bench wire`.

Each mode runs in a network namespace of its own, where the kernel counts every byte sent, headers
and acknowledgements included. Exit 1 where they are more than 1.03 times the recorded ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.harness.catalogue import chosen_modes, ours
from bench.harness.hosts import one_host, require_root
from bench.harness.interleave import end_cleanly
from bench.harness.ranks import CaseFailed, RankGroup
from bench.harness.report import WIRE_TARGET, met_word
from bench.harness.spec import CONTEXT_MODES, MODES, SIZES, ZERO_MODES, Mode, Size


def main() -> int:
    """Measure the chosen modes and print one line for each."""
    parser = argparse.ArgumentParser(prog="python -m bench wire", description=__doc__)
    parser.add_argument("--modes", default=",".join([*MODES, *ZERO_MODES, *CONTEXT_MODES]))
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    require_root("private counters of bytes")
    end_cleanly()
    worst = 0.0
    try:
        modes = chosen_modes(arguments.modes)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for mode in modes:
        try:
            wire, recorded = wire_bytes(mode, SIZES[arguments.size], steps=arguments.steps)
        except CaseFailed as error:
            print(f"{mode.name} did not run: {error}")
            return 1
        ratio = wire / sum(recorded.values())
        worst = max(worst, ratio)
        by_axis = ", ".join(f"{axis} {count}" for axis, count in recorded.items())
        print(f"{mode.name}: {wire} bytes on the wire, recorded {by_axis} = {ratio:.4f}x")
    met = worst <= WIRE_TARGET
    print(f"worst {worst:.4f}x, target <= {WIRE_TARGET:.2f}x: {met_word(met)}")
    return int(not met)


def wire_bytes(mode: Mode, size: Size, *, steps: int) -> tuple[int, dict[str, int]]:
    """Return per step (bytes that the kernel counted, bytes that the engine recorded by axis)."""
    case = ours(mode)
    with (
        tempfile.TemporaryDirectory(prefix="echelon-bench-") as logs,
        one_host() as host,
        RankGroup(case, case.settings(size), [host], Path(logs)) as group,
    ):
        group.run(warmup=0, steps=1)
        taken = group.run(warmup=0, steps=steps)
    assert taken.sent_bytes is not None
    assert taken.recorded_bytes is not None
    return taken.sent_bytes, taken.recorded_bytes


if __name__ == "__main__":
    sys.exit(main())
