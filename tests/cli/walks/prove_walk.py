"""Random plans, proven by the command: `python -m tests.cli.walks.prove_walk --plans 100 --seed 7`.

Each is drawn as settings on a preset: every third a mixture with a capacity factor, the others of a
random family (`tests.walks.plans.random_families`). `echelon plan` is asked first. Where it
refuses the settings, the draw is no plan; where it does not, `echelon prove` must prove them. A
refusal by `prove` is a failure, as is a proof that does not hold, a traceback, or a command that
hangs.

`--plans` counts plans that `echelon plan` takes: the walk goes on until it has so many. Each draw
leaves one JSON line with the command that does it again; with the same results the walk goes on
where it stopped. The figures come last. Exit 1 where a plan is not proven.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from echelon.core.version import source_hash
from tests.cli.walks.commands import CommandEnd, Commands, commands_in
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.plans.random_families import draw_any, draw_family
from tests.walks.plans.random_settings import PRESET, Settings, flags_of
from tests.walks.rehearsals.random_walk import until_so_many_ran

Line = dict[str, Any]

MIXTURES = 3
"""Number of draws of which one is a mixture with a capacity factor."""
_EXIT_REFUSED = 2


def draw(seed: int, number: int, offload_dir: str) -> Settings:
    """Return the settings of plan `number` of a walk; they depend on nothing else."""
    random = Random(f"{seed}/{number}")
    if number % MIXTURES == 0:
        return draw_family(random, offload_dir, "capacity")
    return draw_any(random, offload_dir)


def with_settings(settings: Settings) -> list[str]:
    """Return the words by which a command takes settings."""
    return [part for flag in flags_of(settings) for part in ("--set", flag)]


def is_refused(planned: CommandEnd) -> bool:
    """True if `echelon plan --json` refused settings by rules."""
    return planned.code == _EXIT_REFUSED and bool(planned.rules)


def prove_random(
    seed: int, number: int, commands: Commands, offload_dir: str, *, flags: Sequence[str] = ()
) -> Line:
    """Draw plan `number` of a walk, prove it by the command, and return how that went.

    `flags` are those of `echelon prove`.
    """
    settings = draw(seed, number, offload_dir)
    words = [PRESET, *with_settings(settings)]
    proof = ["prove", *words, *flags]
    result: Line = {"seed": seed, "number": number, "flags": [*flags]}
    result |= {"mixture": "experts.capacity_factor" in settings, "problem": ""}
    planned = commands.run("plan", *words, "--json")
    result |= {"command": planned.command.replace(" plan ", " prove ", 1)}
    if is_refused(planned):
        return result | {"outcome": "refused", "rules": planned.rules, "seconds": 0.0}
    if planned.code not in (0, 1):
        problem = f"echelon plan ends with {planned.code}\n{planned.last_lines}"
        return result | {"outcome": "failed", "rules": (), "seconds": 0.0, "problem": problem}
    proven = commands.run(*proof)
    result |= {"command": proven.command, "rules": (), "seconds": proven.seconds}
    if proven.code == 0:
        return result | {"outcome": "proven"}
    problem = f"echelon prove ends with {proven.code}\n{proven.last_lines}"
    return result | {"outcome": "failed", "problem": problem}


def walk_proofs(
    seed: int, count: int, results: Path | None, *, first: int = 0, flags: Sequence[str] = ()
) -> Iterator[Line]:
    """Yield how each draw from `first` on went, until `count` were plans.

    Draws that `results` holds for this very code are skipped.
    """
    code = source_hash()[:16]
    known = {
        (line["seed"], line["number"]): line
        for line in lines_of(results, code)
        if line["flags"] == [*flags]
    }
    with (
        tempfile.TemporaryDirectory(prefix="echelon-walk-") as folder,
        commands_in(Path(folder)) as commands,
    ):

        def walk(number: int) -> Line:
            line = known.get((seed, number))
            if line is None:
                line = prove_random(seed, number, commands, folder, flags=flags) | {"code": code}
                append_line(results, line)
            return line

        yield from until_so_many_ran(lambda number: walk(first + number), count, was_planned)


def was_planned(line: Line) -> bool:
    """True if `echelon plan` took a draw."""
    return line["outcome"] != "refused"


def summary(lines: Sequence[Line]) -> str:
    """Return the figures of a walk."""
    planned = [line for line in lines if was_planned(line)]
    proven = [line for line in planned if line["outcome"] == "proven"]
    seconds = [float(line["seconds"]) for line in proven]
    slowest = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else sum(seconds)
    refusals = Counter(rule for line in lines if not was_planned(line) for rule in line["rules"])
    text = [
        f"{len(planned)} plans, {sum(line['mixture'] for line in planned)} of them mixtures with a "
        f"capacity factor: {len(proven)} proven, {len(planned) - len(proven)} failed; "
        f"`echelon plan` refused {len(lines) - len(planned)} more",
        f"seconds of a proof: median {median(seconds or [0.0]):.1f}, "
        f"nine of ten within {slowest:.1f}",
    ]
    return "\n".join([*text, *(f"{count:6}  {rule}" for rule, count in refusals.most_common())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk random plans; return 1 where one is not proven."""
    parser = argparse.ArgumentParser(prog="python -m tests.cli.walks.prove_walk")
    parser.add_argument("--plans", type=int, default=20, help="how many plans to prove (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (0)")
    parser.add_argument("--results", type=Path, help="JSON lines; draws in it are skipped")
    parser.add_argument(
        "--late", action="store_true", help="also complete operations as late as they may"
    )
    parser.add_argument(
        "--quick", action="store_true", help="prove the first steps, in float64 alone"
    )
    options = parser.parse_args(arguments)
    lines: list[Line] = []
    flags = [f"--{name}" for name in ("late", "quick") if getattr(options, name)]
    walked = walk_proofs(
        options.seed, options.plans, options.results, first=options.first, flags=flags
    )
    for line in walked:
        lines.append(line)
        text = f"{line['seconds']:.1f} s" if was_planned(line) else ", ".join(line["rules"])
        print(f"{line['number']:4} {line['outcome']:8} {text}")
        if line["problem"]:
            print(f"{line['command']}\n{line['problem']}")
        sys.stdout.flush()
    print(f"\n{summary(lines)}")
    return int(sum(line["outcome"] == "proven" for line in lines) < options.plans)


if __name__ == "__main__":
    sys.exit(main())
