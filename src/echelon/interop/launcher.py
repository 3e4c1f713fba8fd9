# SPDX-License-Identifier: Apache-2.0
"""How many processes a launcher starts: from its line, its file, or the lines of a batch script.

A file of settings does not say it, and a mesh, a batch and a cluster follow from it. Where no
cluster is named, one with as many devices is taken.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path

from echelon.config.cluster.settings import DEFAULT_CLUSTER, named_cluster, smallest_cluster
from echelon.config.entries import Entries, Entry
from echelon.config.reading import is_file
from echelon.config.schema import CLUSTER_SOURCES
from echelon.core.cluster import Cluster
from echelon.core.errors import Problem
from echelon.core.rulebook.interop import IMPORT_RANKS
from echelon.interop.import_context import AXES
from echelon.interop.key_reader import KeyOutcome
from echelon.interop.parsing import command_words

GENERIC_CLUSTER = "8xh100"
"""Whose devices are taken where a run has more ranks than the default cluster has devices."""
LEAST_WORDS = 2  # of a line
KEY = "(launcher)"
COMMAND = Path("(command)")
"""The file of the keys of a line that was given as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Name the flags of a launcher that count, as `launchers.toml` has them."""

    total: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    file: str = ""
    read_by_tools: bool = False


@cache
def launchers() -> Mapping[str, Launcher]:
    """Return the launchers by name."""
    rows = tomllib.loads((files("echelon.interop") / "launchers.toml").read_text("utf-8"))
    return {name: Launcher(**row) for name, row in rows.items()}


def launch_line(named: str | Path) -> str:
    """Return the text that was given as a file if it is the line of a launcher; else ""."""
    line = str(named).strip()
    words = line.split()
    starts = {*launchers(), "python", "python3", "llamafactory-cli", "axolotl"}
    if len(words) < LEAST_WORDS or is_file(Path(line)):
        return ""
    return line if any(_name(word) in starts for word in words) else ""


_BATCH = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_SLOTS = re.compile(r"^[^#\s]\S*\s+slots=(\d{1,6})", re.MULTILINE)
_PROCESSES = re.compile(r"^num_processes:\s*(\d{1,9})\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Hold how many processes are started, where that is known, and who says it."""

    ranks: int | None
    rows: tuple[KeyOutcome, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_launcher(path: Path, text: str, ranks: int | str | None) -> Launched:
    """Return how many processes are started: `ranks`, or what the line or file there starts.

    Where it is absent, `text` of `path` is looked through for a launcher whose flags no tool reads.
    """
    if ranks is None:
        found = _count_in(path, text, foreign_only=True)
        return Launched(ranks=None) if found is None else _launched(*found)
    if isinstance(ranks, int):
        return Launched(ranks=ranks)
    file = Path(ranks).expanduser()
    is_file = " " not in ranks and file.is_file()
    line = file.read_text(encoding="utf-8", errors="replace") if is_file else ranks
    found = _count_in(file if is_file else Path(), line, foreign_only=False)
    if found is not None:
        return _launched(*found)
    message = f"--launcher {ranks!r} does not say how many processes are started"
    fixes = ("--launcher 'torchrun --nnodes 2 --nproc-per-node 8'", "--ranks 16")
    problem = IMPORT_RANKS.problem(
        message, key="--launcher", set_by="--launcher", suggestions=fixes
    )
    return Launched(ranks=None, problems=(problem,))


def assumed_cluster(named: Entries, settings: Entries) -> dict[str, tuple[Entry, str]]:
    """Return the cluster to take, and why, where none is named and the mesh needs a larger one."""
    if any(source in named for source in CLUSTER_SOURCES):
        return {}
    degrees = [settings[key].value for axis in AXES if (key := f"mesh.{axis}") in settings]
    world = prod(degree for degree in degrees if isinstance(degree, int))
    default = named_cluster(DEFAULT_CLUSTER, "")
    if isinstance(default, Cluster) and world <= default.num_devices:
        return {}
    name = smallest_cluster(GENERIC_CLUSTER, world)
    why = f"cluster.preset = {name!r}, for {world} ranks; --set cluster.preset=NAME names yours"
    return {"cluster.preset": (Entry(value=name, source=f"assumed for {world} ranks"), why)}


def after_launcher(words: Sequence[str]) -> list[str]:
    """Return the words of a command behind a launcher whose flags no tool reads."""
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    names = [_name(word) for word in words[:script]]
    if not any(name in _read_here() for name in names):
        return list(words)
    own = (n for n, name in enumerate(names) if name in launchers() and name not in _read_here())
    return list(words[next(own, script) :])


def _read_here() -> list[str]:
    """Return the launchers whose flags no tool reads."""
    return [name for name, launcher in launchers().items() if not launcher.read_by_tools]


def _launched(ranks: int, line: str) -> Launched:
    row = KeyOutcome(key=KEY, given=line, why=f"it starts {ranks} processes")
    return Launched(ranks=ranks, rows=(row,))


def _count_in(path: Path, text: str, *, foreign_only: bool) -> tuple[int, str] | None:
    """Return how many processes a text says are started, and the line that does."""
    if not foreign_only and (found := _count_in_file(text)):
        return found, path.name
    names = _read_here() if foreign_only else list(launchers())
    if not any(re.search(rf"(^|[\s/]){re.escape(name)}\s", text) for name in names):
        return None
    words = command_words(path, text)
    place = next((n for n, word in enumerate(words) if _name(word) in names), None)
    if place is None:
        return None
    end = next((n for n, w in enumerate(words) if n > place and w.endswith(".py")), len(words))
    batch = [word for line in _BATCH.findall(text) for word in line.split()]
    line = words[place:end]
    count = _count(_name(line[0]), line[1:], batch, path.parent)
    return None if count is None else (count, " ".join(line))


def _count_in_file(text: str) -> int | None:
    """Return the processes of a hostfile, or of a configuration of Accelerate."""
    if slots := _SLOTS.findall(text):
        return sum(map(int, slots))
    found = _PROCESSES.search(text)
    return int(found[1]) if found else None


def _count(name: str, words: Sequence[str], batch: Sequence[str], folder: Path) -> int | None:
    flags = launchers()[name]
    given = dict(_pairs(words))
    if name == "srun":
        given = {**dict(_pairs(batch)), **given}
    total, nodes, per_node = (
        next((count for key in keys if (count := _whole(given.get(key, ""))) is not None), None)
        for keys in (flags.total, flags.nodes, flags.per_node)
    )
    if total is not None:
        return total
    if flags.file in given:
        file = folder / given[flags.file]
        return _count_in_file(file.read_text("utf-8", "replace")) if file.is_file() else None
    return None if per_node is None else per_node * (nodes or 1)


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with the word behind it, underscores as dashes."""
    for place, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            behind = words[place + 1] if place + 1 < len(words) else ""
            dashed = name.replace("_", "-") if name.startswith("--") else name
            yield dashed, value if equals else behind


def _whole(word: str) -> int | None:
    """Return a count: 8, gpu:8 or gpu:h100:8."""
    last = word.rpartition(":")[2]
    return int(last) if re.fullmatch(r"[1-9]\d{0,8}", last) else None


def _name(word: str) -> str:
    return word.rpartition("/")[2]
