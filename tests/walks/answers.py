"""Record what commands print, and compare two recordings: a change of structure changes no answer.

    python -m tests.walks.answers record DIR
    python -m tests.walks.answers compare BEFORE AFTER

An answer is a file: the command, its exit code, both outputs, and the text files that it wrote.
What is asked is in `answers.toml`, and in lists that the commands themselves print. The package is
the one that Python finds: PYTHONPATH=CHECKOUT/src:. records that of another checkout.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import cleandoc
from itertools import islice
from pathlib import Path
from typing import Any

ASKED = Path(__file__).with_suffix(".toml")
WORKERS = 2
MOST_LINES = 40
"""Lines of differences that are shown of a kind."""
MOST_NAMES = 20
"""Names of answers that are shown of a kind."""
LONGEST_FILE = 400_000
"""Characters of a written file; of a longer one its hash stands in the answer."""

VOLATILE: Mapping[str, tuple[str, str]] = {
    "seconds of a search": (r"(legal plans? in )[\d.,]+ \w+", r"\1SECONDS"),
    "seconds of a search, as JSON": (
        r'("interrupted": \w+,\s+"seconds": )[\d.e+-]+',
        r"\1SECONDS",
    ),
    "version": (r"\b([Ee]chelon[ /]v?)\d+\.\d+\.\d+[\w.+]*", r"\1VERSION"),
    "version, as JSON": (r'("(?:echelon_)?version": )"\d+\.\d+[^"]*"', r'\1"VERSION"'),
    "time of day": (r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?\S*", "TIME"),
    "the way of a traceback": (
        r"Traceback \(most recent call last\):\n(?: .*\n)+",
        "Traceback\n",
    ),
}
"""What differs between two recordings of one tree, by name: a pattern, and what stands for it."""
PROGRESS = re.compile(
    r"^(?:searching for plans|searching on four sizes|looking at other plans"
    r"|looking for what would fit|planning|comparing|rehearsing|measuring the (?:model|machine))"
    r"(?: \.\.\.|: )[^\n]*\n",
    re.M,
)
"""Lines on stderr that long work shows, and short work does not."""
INTERRUPTED = 130
"""The exit code of a command that was stopped by a signal, with which a recording ends."""
LAUNCH = ("COLUMNS", "LINES", "FORCE_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TF_CONFIG")
"""Variables that would change answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A command to run, in a folder of its own that holds `files`; `columns` are its terminal's."""

    kind: str
    name: str
    words: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: int | None = None

    @property
    def path(self) -> Path:
        """Return where its answer lies in a recording."""
        return Path(self.kind, re.sub(r"[^\w.+-]+", "-", self.name) + ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did: its exit code, what it printed, and the files that it wrote."""

    code: int
    output: str
    errors: str
    written: Mapping[str, str]

    def text(self, question: Question) -> str:
        """Return the file of an answer."""
        parts = [f"$ echelon {shlex.join(question.words)}\nexit {self.code}\n"]
        parts.append(f"--- stdout\n{self.output}")
        parts.append(f"--- stderr\n{PROGRESS.sub('', self.errors)}")
        parts += [f"--- file {name}\n{text}" for name, text in self.written.items()]
        return stable("\n".join(part.rstrip("\n") + "\n" for part in parts))


def stable(text: str) -> str:
    """Return a text without what differs from one recording to the next."""
    for pattern, instead in VOLATILE.values():
        text = re.sub(pattern, instead, text)
    return text


def ask(question: Question) -> Outcome:
    """Run a command in this process, as `python -m echelon` would run it."""
    folder = Path(tempfile.mkdtemp(prefix="answer-")).resolve()
    output, errors = io.StringIO(), io.StringIO()
    for name, text in question.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if question.columns is None:
        os.environ.pop("COLUMNS", None)
    else:
        os.environ["COLUMNS"] = str(question.columns)
    with chdir(folder), redirect_stdout(output), redirect_stderr(errors):
        try:
            code = int(import_module("echelon.__main__").main(list(question.words)))
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 1
        except Exception:
            traceback.print_exc()
            code = -1
    written = dict(_written(folder, question.files))
    shutil.rmtree(folder)
    printed = (text.getvalue().replace(str(folder), "FOLDER") for text in (output, errors))
    return Outcome(code=code, output=next(printed), errors=next(printed), written=written)


def _written(folder: Path, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder that were not given, each with its text or its hash."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in given:
            continue
        raw = path.read_bytes()
        text = raw.decode("utf-8", errors="replace").replace(str(folder), "FOLDER")
        if len(text) > LONGEST_FILE or "\0" in text:
            text = f"{len(text)} characters, sha256 {sha256(stable(text).encode()).hexdigest()}\n"
        yield name, text


def printed(*words: str) -> Any:
    """Return what a command prints with --json; None where it fails."""
    found = ask(Question(kind="", name="", words=(*words, "--json")))
    return json.loads(found.output) if found.code == 0 else None


@cache
def asked() -> Mapping[str, Any]:
    """Return the tables of `answers.toml`."""
    return tomllib.loads(ASKED.read_text(encoding="utf-8"))


def questions() -> list[Question]:
    """Return everything that is asked, in the same order each time."""
    found = [*_of_file(), *_explained(), *_presets(), *_examples()]
    found = [one for one in found if one.path.as_posix() not in asked()["left_out"]]
    twice = [path for path, times in Counter(one.path for one in found).items() if times > 1]
    if twice:
        raise ValueError(f"more than one answer is called {', '.join(map(str, twice))}")
    return found


def both(kind: str, name: str, *words: str) -> Iterator[Question]:
    """Yield a question for the text of an answer, and one for its JSON."""
    yield Question(kind=kind, name=name, words=words)
    yield Question(kind=f"{kind}-json", name=name, words=(*words, "--json"))


def _of_file() -> Iterator[Question]:
    for kind, commands in asked()["kinds"].items():
        for name, command in commands.items():
            words = tuple(shlex.split(command))
            if kind in asked()["as_json"]:
                yield from both(kind, name, *words)
            else:
                columns = asked()["columns"].get(kind)
                yield Question(kind=kind, name=name, words=words, columns=columns)


def _rules() -> list[str]:
    areas: Mapping[str, list[str]] = printed("explain")["areas"]
    return [rule for rules in areas.values() for rule in rules]


def _explained() -> Iterator[Question]:
    """Yield whatever `echelon explain` knows: rules, settings, lints, claims and words."""
    for rule in _rules():
        yield from both("explain-rule", rule, "explain", rule)
    for key in printed("config", "show", "toy-experts")["settings"]:
        yield from both("explain-setting", key, "explain", key)
    for lint in printed("explain", "lints")["lints"]["lints"]:
        yield from both("explain-lint", lint["id"], "explain", lint["id"])
    for claim in printed("explain", "errata")["errata"]["claims"]:
        yield from both("explain-claim", claim["id"], "explain", claim["id"])
    for number, word in enumerate(asked()["words"]):
        yield from both("explain-word", f"{number:03}-{word}", "explain", word)


def _presets() -> Iterator[Question]:
    for preset in printed("config", "presets")["presets"]:
        kind, name = preset["kind"], preset["name"]
        shown = ("--cluster", f"8x{name}") if kind == "cluster" else (name,)
        yield from both(f"config-{kind}", name, "config", "show", *shown)
        yield Question(
            kind=f"config-{kind}-toml", name=name, words=("config", "show", *shown, "--toml")
        )


def _examples() -> Iterator[Question]:
    """Yield the examples of rules that are files: what is refused, and what works."""
    for rule in _rules():
        explained = (printed("explain", rule) or {}).get("rule", {})
        for which in ("bad", "fixed"):
            text = cleandoc(explained.get(which, "")) + "\n"
            found = _example(rule, text)
            if found is not None:
                words, files = found
                yield Question(kind=f"example-{which}", name=rule, words=words, files=files)


def _example(rule: str, text: str) -> tuple[tuple[str, ...], Mapping[str, str]] | None:
    """Return how an example is tried, as a command and its files; None where it is no file."""
    lists = asked()["rules"]
    if rule in lists["clusters"]:
        files = {"boxes.toml": asked()["cluster"] + text}
        return ("config", "show", "--cluster", "boxes.toml"), files
    if rule in lists["schedules"]:
        return ("schedule", "check", "mine.csv", "--most-in-flight", "1"), {"mine.csv": text}
    if rule in lists["imports"]:
        return ("import", "ds_config.json"), {"ds_config.json": text}
    base = "" if rule in lists["alone"] else 'extends = "nano"\n'
    if base and not _is_toml(text):
        return None
    return ("plan", "run.toml"), {"run.toml": base + text, "config.json": "{}"}


def _is_toml(text: str) -> bool:
    try:
        return bool(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return False


def record(folder: Path) -> None:
    """Write every answer into a new folder, by two processes."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is there and not empty: name a new folder")
    for name in LAUNCH:
        os.environ.pop(name, None)
    start_s = time.monotonic()
    forks = multiprocessing.get_context("fork")
    workers = [forks.Process(target=_record, args=(folder, at)) for at in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    kinds = Counter(path.parent.name for path in folder.rglob("*.txt"))
    for kind, count in sorted(kinds.items()):
        print(f"{count:6} {kind}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s, cpu_s = time.monotonic() - start_s, used.ru_utime + used.ru_stime
    print(f"{kinds.total():6} answers in {took_s:.0f} s, {cpu_s:.0f} s of CPUs")
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a process failed: this recording is not complete")


def _record(folder: Path, at: int) -> None:
    """Write each answer whose turn it is in this process: turns do not depend on seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stdin = io.StringIO()
    if at == 0:
        print(f"recording {import_module('echelon').__file__}", flush=True)
    for question in questions()[at::WORKERS]:
        found = ask(question)
        if found.code == INTERRUPTED:
            raise SystemExit(INTERRUPTED)
        path = folder / question.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.text(question), encoding="utf-8")


def compare(before: Path, after: Path, most_lines: int) -> bool:
    """Print which answers differ, kind by kind, and return whether all are equal."""
    was, now = _answers(before), _answers(after)
    if not was or not now:
        raise SystemExit(f"no answers in {before if not was else after}")
    kinds: dict[str, list[str]] = {}
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            kinds.setdefault(name.partition("/")[0], []).append(name)
    for kind, names in kinds.items():
        print(f"== {kind}: {len(names)} of {sum(one.startswith(f'{kind}/') for one in was)} differ")
        for name in names[:MOST_NAMES]:
            state = "gone" if name not in now else "new" if name not in was else "differs"
            print(f"   {state:8} {name}")
        if len(names) > MOST_NAMES:
            print(f"   and {len(names) - MOST_NAMES} more")
        lines = (line for name in names for line in _difference(name, was, now))
        print("\n".join(islice(lines, most_lines)))
    count = sum(map(len, kinds.values()))
    print(f"{len(was)} answers before, {len(now)} after: {count or 'none'} of them differ")
    return not kinds


def _answers(folder: Path) -> dict[str, str]:
    """Return the answers of a recording by kind and name."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.glob("*/*.txt")
    }


def _difference(name: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if name in was and name in now:
        left, right = was[name].splitlines(), now[name].splitlines()
        yield from unified_diff(left, right, f"before/{name}", f"after/{name}", n=1, lineterm="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(prog="python -m tests.walks.answers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write every answer into a new folder")
    recording.add_argument("folder", type=Path)
    comparing = commands.add_parser("compare", help="say which answers differ; exit 1 if any do")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--lines", type=int, default=MOST_LINES, help="of a kind's differences")
    given = parser.parse_args(arguments)
    if given.command == "record":
        record(given.folder.absolute())
        return 0
    return 0 if compare(given.before, given.after, given.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
