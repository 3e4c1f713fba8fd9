"""Random plans, trained and used by commands: `python -m tests.cli.walks.train_walk --runs 40`.

Each is drawn as `tests.cli.walks.prove_walk` draws it, shortened to a few steps on a small text.
`echelon plan` is asked first: where it refuses the settings, the draw is no plan. Else they are
trained, text is written from the run (on one rank, and on the tensor and pipeline ranks of its
training), its weights are exported, and the run goes on under another layout that `echelon plan`
takes. Each of these commands must end with 0.

A model that no architecture of transformers says is exported in Echelon's own names in its place
(`--to echelon`): every model has these, and a refusal there counts as a failure.

`--runs` counts runs that `echelon plan` takes. Each draw leaves one JSON line; with the same
results the walk goes on where it stopped. Exit 1 where a command failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.version import source_hash
from tests.cli.walks.commands import CommandEnd, Commands, commands_in
from tests.cli.walks.prove_walk import Line, draw, is_refused, was_planned, with_settings
from tests.walks.matrix.walk import append_line, lines_of
from tests.walks.plans.random_settings import PRESET, Settings, draw_settings, flags_of
from tests.walks.rehearsals.random_walk import until_so_many_ran

NUM_STEPS = 2
"""Steps of a run, and of the run that resumes it."""
TEXT_BYTES = 150_000
"""Bytes of the text that runs read."""
_OF_LAYOUT = ("mesh.", "zero.", "pipeline.", "context.", "recompute.", "collectives.", "threads.")
_OF_EXPERT_LAYOUT = tuple(
    f"experts.{name}" for name in ("expert_tp", "zero_stage", "dispatch", "chunks", "padded")
)
_ROUNDED = ("zero.gather", "zero.int8_block")
"""Settings of a layout that round what is computed, and so belong to the mathematics."""
_LAYOUT_DRAWS = 60
_NO_ARCHITECTURE = {"weights-have-architecture", "weights-type-names-shape"}
"""Rules of an export that no architecture of transformers says a model."""
_WORLD = 8


def shortened(drawn: Settings) -> Settings:
    """Return a run of few steps that saves and validates at its end."""
    chosen = {key: value for key, value in drawn.items() if key != "optimizer.warmup_steps"}
    if "optimizer.decay_steps" in chosen:
        chosen["optimizer.decay_steps"] = 1
    return chosen | {"optimizer.warmup_steps": 0} | of_steps(drawn, 1)


def of_steps(drawn: Settings, times: int) -> Settings:
    """Return the steps of a run of `times` the length of the first: whole rounds of islands."""
    every, delay = (drawn.get(f"local_sgd.{name}", 0) for name in ("every", "delay"))
    assert isinstance(every, int)
    assert isinstance(delay, int)
    steps = (every or NUM_STEPS) * times + delay
    # Islands that may be lost do not validate.
    validated = "never" if "local_sgd.min_islands" in drawn else steps
    return {"train.steps": steps, "checkpoint.every": steps, "train.validate_every": validated}


def is_small(drawn: Settings) -> bool:
    """True if a draw has a model and ranks that train here."""
    return "model.layers" in drawn and "cluster.preset" not in drawn


def other_layout(random: Random, settings: Settings, offload_dir: str) -> Settings | None:
    """Return the settings under another layout of any ranks; None where no draw is a plan.

    Of a run with servers it has other servers.
    """
    if "servers.count" in settings:
        # Workers and the order of their pushes are mathematics; servers are not.
        return settings | {"servers.count": 3 - int(str(settings["servers.count"]))}
    kept = {key: value for key, value in settings.items() if not _of_layout(key)}
    if "local_sgd.every" in settings:
        kept["mesh.dp_replicate"] = settings["mesh.dp_replicate"]
    same = set(flags_of(settings))
    for _ in range(_LAYOUT_DRAWS):
        drawn = draw_settings(random, offload_dir)
        layout = {key: value for key, value in drawn.items() if _of_layout(key)}
        if settings.get("experts.aux_over") != "microbatch":
            layout["batch.microbatch_sequences"] = drawn["batch.microbatch_sequences"]
        if "model.experts.num_experts" not in settings:
            layout = {key: value for key, value in layout.items() if not key.startswith(_EXPERTS)}
        chosen = layout | kept
        try:
            job = load_job(PRESET, flags_of(chosen))
        except ConfigError:
            continue
        if job.plan.mesh.world_size <= _WORLD and set(flags_of(chosen)) != same:
            return chosen
    return None


_EXPERTS = ("experts.", "mesh.ep")


def _of_layout(key: str) -> bool:
    layout = key.startswith(_OF_LAYOUT) or key in _OF_EXPERT_LAYOUT
    return layout and key not in _ROUNDED


class _Walk:
    """Run the commands of one draw, and keep what failed."""

    def __init__(self, commands: Commands) -> None:
        """Begin without a failure."""
        self._commands = commands
        self.problems: list[str] = []
        self.seconds: dict[str, float] = {}

    def runs(self, name: str, *words: str) -> bool:
        """Run a command that must end with 0; return whether it did."""
        end = self._commands.run(*words)
        return self.ended(name, end)

    def ended(self, name: str, end: CommandEnd) -> bool:
        """Keep how a command ended that must end with 0; return whether it did."""
        self.seconds[name] = end.seconds
        if end.code:
            self.problems.append(f"{name} ends with {end.code}: {end.command}\n{end.last_lines}")
        return end.code == 0


def train_random(seed: int, number: int, commands: Commands, text: Path, folder: Path) -> Line:
    """Draw run `number` of a walk, train it and use it, and return how that went."""
    random = Random(f"{seed}/{number}/train")
    offload = str(folder / "offload")
    Path(offload).mkdir(parents=True)
    drawn = draw(seed, number, offload)
    result: Line = {"seed": seed, "number": number, "outcome": "refused", "rules": (), "export": ""}
    result |= {"problems": [], "seconds": {}, "mixture": "experts.capacity_factor" in drawn}
    if not is_small(drawn):
        return result | {"rules": ("large",), "command": ""}
    place: Settings = {
        "data.source": str(text),
        "train.runs_dir": str(folder),
        "train.run_name": "first",
    }
    settings = shortened(drawn) | place
    words = [PRESET, *with_settings(settings)]
    planned = commands.run("plan", *words, "--json")
    result["command"] = planned.command.replace(" plan ", " train ", 1)
    if is_refused(planned):
        return result | {"rules": planned.rules}
    walk = _Walk(commands)
    if walk.runs("train", "train", *words):
        run = str(folder / "first")
        _write_texts(walk, settings, run)
        result["export"] = _export(walk, commands, run, folder)
        result["onwards"] = _go_on(walk, random, drawn, settings, folder)
    outcome = "failed" if walk.problems else "works"
    return result | {"outcome": outcome, "problems": walk.problems, "seconds": walk.seconds}


def _write_texts(walk: _Walk, settings: Settings, run: str) -> None:
    """Write on one rank, and on the tensor and pipeline ranks of the training."""
    prompts = ("--prompt", "the ", "--prompt", "def f(x):\n")
    words = ("generate", run, *prompts, "--max-tokens", "3", "--temperature", "0")
    walk.runs("generate", *words)
    split = {key: settings[key] for key in ("mesh.tp", "mesh.pp") if key in settings}
    if split:
        walk.runs("generate split", *words, *with_settings(split | {"mesh.dp_replicate": 1}))


def _export(walk: _Walk, commands: Commands, run: str, folder: Path) -> str:
    """Export the weights, and return for whom."""
    end = commands.run("export", "weights", run, "--out", str(folder / "hf"), "--json")
    if not (end.code and _NO_ARCHITECTURE.intersection(end.rules)):
        walk.ended("export", end)
        return "hf"
    own = ("--to", "echelon", "--out", str(folder / "echelon"), "--json")
    walk.runs("export", "export", "weights", run, *own)
    return "echelon"


def _go_on(
    walk: _Walk, random: Random, drawn: Settings, settings: Settings, folder: Path
) -> list[str]:
    """Resume under another layout, and return its settings."""
    longer = settings | of_steps(drawn, 2) | {"train.run_name": "second"}
    other = other_layout(random, longer, str(folder / "offload"))
    if other is None:
        walk.problems.append("no other layout was found")
        return []
    words = ("train", PRESET, *with_settings(other), "--resume", str(folder / "first"))
    walk.runs("resume", *words)
    return flags_of({key: value for key, value in other.items() if _of_layout(key)})


def walk_runs(seed: int, count: int, results: Path | None, *, first: int = 0) -> Iterator[Line]:
    """Yield how each draw from `first` on went, until `count` were plans.

    Draws that `results` holds for this very code are skipped.
    """
    code = source_hash()[:16]
    known = {(line["seed"], line["number"]): line for line in lines_of(results, code)}
    with (
        tempfile.TemporaryDirectory(prefix="echelon-walk-") as name,
        commands_in(Path(name)) as commands,
    ):
        text = small_text(Path(name))

        def walk(number: int) -> Line:
            line = known.get((seed, number))
            if line is None:
                folder = Path(name) / str(number)
                line = train_random(seed, number, commands, text, folder) | {"code": code}
                append_line(results, line)
                shutil.rmtree(folder)
            return line

        yield from until_so_many_ran(lambda number: walk(first + number), count, was_planned)


def small_text(folder: Path) -> Path:
    """Write a text of several documents, and return its file."""
    modules = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8", errors="ignore") for module in modules[:20])
    file = folder / "text.txt"
    file.write_text(text[:TEXT_BYTES], encoding="utf-8")
    return file


def summary(lines: Sequence[Line]) -> str:
    """Return the figures of a walk."""
    runs = [line for line in lines if was_planned(line)]
    works = sum(line["outcome"] == "works" for line in runs)
    exports = Counter(line["export"] for line in runs)
    refusals = Counter(rule for line in lines if not was_planned(line) for rule in line["rules"])
    return "\n".join(
        [
            f"{len(runs)} runs, {sum(line['mixture'] for line in runs)} of them mixtures with a "
            f"capacity factor: all commands of {works} work, {len(runs) - works} failed; "
            f"{len(lines) - len(runs)} draws were no plans, or too large",
            "exported: " + ", ".join(f"{name} {n}" for name, n in exports.most_common()),
            *(f"{count:6}  {rule}" for rule, count in refusals.most_common()),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk random runs; return 1 where a command failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cli.walks.train_walk")
    parser.add_argument("--runs", type=int, default=10, help="how many runs to train (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (0)")
    parser.add_argument("--results", type=Path, help="JSON lines; draws in it are skipped")
    options = parser.parse_args(arguments)
    lines: list[Line] = []
    for line in walk_runs(options.seed, options.runs, options.results, first=options.first):
        lines.append(line)
        outcome = " ".join(f"{name} {seconds:.0f} s" for name, seconds in line["seconds"].items())
        print(f"{line['number']:4} {line['outcome']:8} {outcome or ', '.join(line['rules'])}")
        for problem in line["problems"]:
            print(f"{line['command']}\n{problem}")
        sys.stdout.flush()
    print(f"\n{summary(lines)}")
    return int(sum(line["outcome"] == "works" for line in lines) < options.runs)


if __name__ == "__main__":
    sys.exit(main())
