"""The entry point: which commands there are, and how an interrupted one ends.

Exit codes: 0 done; 1 ran, and the answer is no; 2 usage or configuration; 3 the environment lacks
something; 4 training failed; 70 a bug of Echelon's own, with its traceback; 75 stopped with a good
checkpoint, try again; 130 interrupted; 141 whoever read the output closed it.

Nothing is imported here that takes long: what is interrupted while it loads ends as quietly as what
is interrupted at work.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

COMMANDS = {
    "init": ("echelon.cli.init:init", "Write a run.toml that builds on a preset."),
    "import": ("echelon.cli.import_:import_", "Turn a configuration of another tool into a run."),
    "export": ("echelon.cli.export:export", "Write a plan for another tool, or as a run.toml."),
    "compare": ("echelon.cli.compare:compare", "Show what differs between two plans."),
    "plan": ("echelon.cli.plan:plan", "Check a run; show what its ranks hold and send."),
    "prove": ("echelon.cli.prove:prove", "Prove that a plan computes what one device computes."),
    "train": ("echelon.cli.train:train", "Train a run; --resume goes on with one."),
    "observe": ("echelon.cli.observe:observe", "Say what a run did; draw its pipeline."),
    "calibrate": ("echelon.cli.calibrate:calibrate", "Measure this machine, or a model's blocks."),
    "demo": ("echelon.cli.demo:demo", "Plan, prove and train a small model here."),
    "explain": ("echelon.cli.explain:explain", "Explain a rule, or list all of them."),
    "config show": ("echelon.cli.config:show", "Show every setting and where it came from."),
    "config presets": ("echelon.cli.config:presets", "List runs, models and clusters."),
    "schedule show": ("echelon.cli.schedule_show:show", "Draw a pipeline schedule."),
    "schedule check": ("echelon.cli.schedule:check", "Prove a pipeline schedule in a file."),
    "data prepare": ("echelon.cli.data:prepare", "Turn text into token shards."),
    "data show": ("echelon.cli.data:show", "Say what is in prepared data."),
    "doctor": ("echelon.cli.doctor:doctor", "Check that this machine can plan, prove and train."),
}
"""Each command, in the order of a first run: where its function is, and what it does."""

FAMILIES = {
    "config": "Show the settings of a run, and the presets.",
    "schedule": "Draw pipeline schedules, and prove your own.",
    "data": "Turn text into token shards, and look at them.",
}
"""The first words that several commands share."""


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an interrupt is one line, whenever it comes."""
    try:
        code = _run([*(sys.argv[1:] if tokens is None else tokens)])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED
    if tokens is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # What is left is to end: another Ctrl-C does that at once, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _run(arguments: list[str]) -> int:
    try:
        from echelon.cli.app import run

        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more can be written: without this the interpreter complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    return code
