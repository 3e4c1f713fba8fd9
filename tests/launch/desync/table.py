"""Plant every mistake in every layout: `python -m tests.launch.desync.table`.

    --after 10             train.desync_after_s of the runs
    --layouts dp,tp        only these (`planted.LAYOUTS`)
    --cases cut,loop       only these

A row is a run that trains on real ranks, one of which goes wrong in its sixth step: the rank that
is named first, whether it is the right one, whether two calls and their lines are told, and the
seconds from the wrong call to the verdict or the note. Exit 1 where a name is wrong, or took longer
than `--after` + 2 s, which holds on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from echelon.launch.local import rank_processes
from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, RunOutcome, run_ranks
from tests.fork_template import ForkTemplate
from tests.launch.desync.planted import LAYOUTS, WRONG_AT, Mistake, plan_for

TARGET = "tests.launch.desync.planted:train_wrongly"
GROUPS = {
    "dp": ("data", 2, 1),
    "dp-pair": ("data", 1, 1),
    "zero3": ("shard", 1, 2),
    "tp": ("tensor", 2, 1),
    "tp-dp": ("tensor", 3, 1),
    "pp": ("pipe_forward", 2, 0),
    "pp-dp": ("pipe_forward", 3, 0),
    "cp": ("ring", 2, 1),
    "ep": ("expert", 1, 1),
}
"""By layout the group whose call goes wrong, the rank, and which of its calls in a step."""
BY_GROUP = ("operation", "order", "shape", "dtype", "missing", "extra", "cut")
BY_RANK = ("return", "exception", "loop", "native")
CASES = (*BY_GROUP[:-1], *BY_RANK[:3], "cut")
ANY_SIZES = ("cp", "ep")
"""Their groups exchange tensors of any sizes: no shape or dtype of one must be that of another."""
TOLD_AS_NOTE = ("loop", "native", "cut", "silent")
"""What time may mend, as far as anyone knows: it is told at once, and ends at the step timeout."""
GRACE_S = 2.0
_CALL = re.compile(r"(call|message) \d+ (of|from).*, at \S+\.py:\d+ in \w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Say how a mistake was named."""

    rank: int
    """The rank that went wrong."""
    text: str
    """What was said first: a note, or the error."""
    after_s: float
    """Seconds from the mistake to that."""
    kind: str
    """What it is: `note`, or the kind of the fault."""

    @property
    def first(self) -> str:
        """Return its first sentence, behind the name of what it is."""
        return re.sub(r"^(note|error\[[a-z-]+\]): ", "", self.text.splitlines()[0])

    @property
    def named(self) -> tuple[int, ...]:
        """Return the ranks that are named to be odd: one, or those of which none is judged."""
        one = re.match(r"rank (\d+)", self.first)
        assert one is not None, self.text
        both = re.search(r"\): and (?:rank (\d+)|ranks ([\d, ]+)) ", self.first)
        if both is None or "most likely" in self.first:
            return (int(one[1]),)
        return (int(one[1]), *map(int, (both[1] or both[2]).split(", ")))

    @property
    def num_calls(self) -> int:
        """Return of how many calls the line is told."""
        return sum(_CALL.search(line) is not None for line in self.text.splitlines())

    @property
    def right(self) -> str:
        """Return whether the right rank is named alone, or only among others."""
        if self.rank not in self.named:
            return "NO"
        if len(self.named) > 1:
            return "among both" if len(self.named) == 2 else "among all"
        return "yes, as likely" if "most likely" in self.first else "yes"


class Terminal(io.StringIO):
    """Take what is written to the terminal, and the times of notes."""

    def __init__(self) -> None:
        """Begin with no notes."""
        super().__init__()
        self.notes: list[tuple[float, str]] = []

    def write(self, text: str, /) -> int:
        """Keep the time of a note."""
        if text.startswith("note: "):
            self.notes.append((time.monotonic(), text))
        return super().write(text)


def mistake_of(layout: str, case: str) -> Mistake:
    """Return the mistake of a case in a layout."""
    group, rank, place = GROUPS[layout]
    return Mistake(case=case, rank=rank, group="" if case in BY_RANK else group, place=place)


def can_be(layout: str, case: str) -> bool:
    """Return whether a mistake can be made in a layout."""
    return not (case in ("shape", "dtype") and layout in ANY_SIZES)


def train(
    layout: str,
    mistake: Mistake | None,
    *,
    after_s: float,
    step_s: float,
    folder: Path | None,
    **more: object,
) -> RunOutcome:
    """Return how a run ends whose ranks compare calls after so long; logs go into `folder`."""
    world = plan_for(layout).mesh.world_size
    limits = Limits(step_s=step_s, desync_s=after_s)
    return run_ranks(
        TARGET,
        {"layout": layout, "mistake": None if mistake is None else asdict(mistake), **more},
        world_size=world,
        labels=[f"{layout}{rank}" for rank in range(world)],
        log_dir=folder,
        options=LaunchOptions(limits=limits, shown_rank=None),
    )


def naming_of(layout: str, case: str, after_s: float) -> Naming:
    """Return how a mistake is named."""
    mistake, terminal, stream = mistake_of(layout, case), Terminal(), sys.stderr
    with tempfile.TemporaryDirectory() as name:
        try:
            sys.stderr = terminal
            outcome = train(
                layout,
                mistake,
                after_s=after_s,
                step_s=after_s + 8.0 if case in TOLD_AS_NOTE else 120.0,
                folder=Path(name),
                steps=100_000,
            )
        finally:
            sys.stderr = stream
        log = (Path(name) / f"rank-{mistake.rank:04d}.log").read_text()
    failure = outcome.failure
    assert failure is not None, "a mistake was made"
    told = next(line for line in log.splitlines() if line.startswith(WRONG_AT))
    began = float(told.removeprefix(WRONG_AT))
    # On a busy machine a rank may be late for so long before: that is told, and no mistake.
    notes = [(at, text) for at, text in terminal.notes if at >= began]
    at, text, kind = failure.fault.at, str(failure), failure.fault.kind.value
    if notes:
        at, text, kind = notes[0][0], notes[0][1].partition("no error yet")[0], "note"
    return Naming(rank=mistake.rank, text=text, after_s=at - began, kind=kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--after", type=float, default=2.0, help="train.desync_after_s")
    parser.add_argument("--layouts", default=",".join(GROUPS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--cases", default=",".join(CASES), help="mistakes")
    options = parser.parse_args(arguments)
    # Ranks are forked from one process that has imported torch: a run starts within a second.
    template = ForkTemplate()
    try:
        with patch.object(rank_processes, "start_fork_server", template.start_fork_server):
            return tell(options.layouts.split(","), options.cases.split(","), options.after)
    finally:
        template.close()


def tell(layouts: Sequence[str], cases: Sequence[str], after_s: float) -> int:
    """Print a row for each mistake; return 1 where a name is wrong or late."""
    print("| case | split | wrong | named | right | calls | after (s) | as |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = late = 0
    for layout in layouts:
        for case in cases:
            if not can_be(layout, case):
                continue
            one = naming_of(layout, case, after_s)
            named = ", ".join(map(str, one.named))
            wrong += one.right == "NO" or one.num_calls < 2
            late += one.after_s > after_s + GRACE_S
            print(
                f"| {case} | {layout} | {one.rank} | {named} | {one.right} | {one.num_calls} | "
                f"{one.after_s:.1f} | {one.kind} |",
                flush=True,
            )
            if one.right == "NO" or one.num_calls < 2:
                print(one.text, file=sys.stderr)
    print(f"wrong: {wrong}; later than {after_s:g} + {GRACE_S:g} s: {late}")
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
