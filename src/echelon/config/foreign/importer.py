"""A foreign file -> a run that loads: its kind told, every key judged, the whole checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from echelon.config.entries import Entry, merge
from echelon.config.foreign.accelerate import read_accelerate
from echelon.config.foreign.command_line import parse_command
from echelon.config.foreign.deepspeed import read_deepspeed
from echelon.config.foreign.ledger import Ledger, Row
from echelon.config.foreign.megatron import read_megatron
from echelon.config.foreign.recorded import TABLE, recorded_entries, recorded_rows
from echelon.config.foreign.sources import flat, parse_json, parse_toml, parse_yaml, read_text
from echelon.config.foreign.surroundings import Surroundings, surroundings
from echelon.config.foreign.torchtitan import read_torchtitan
from echelon.config.gather import Gathered, gather, parse_sets
from echelon.config.job import Job
from echelon.config.load import run_name_of
from echelon.config.resolve import resolve
from echelon.core.errors import ConfigError
from echelon.core.rulebook.imports import IMPORT_KIND

Kind = Literal["deepspeed", "accelerate", "megatron", "torchtitan"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TOOLS: Mapping[Kind, str] = {
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
}
READERS: Mapping[Kind, Callable[[Ledger, Surroundings], None]] = {
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
}
DEFAULT_BASE: Mapping[Kind, str | None] = {
    "deepspeed": "nano",
    "accelerate": "nano",
    "megatron": None,
    "torchtitan": None,
}
"""What a run builds on unless told otherwise; a command of Megatron-LM describes its model, a
configuration of torchtitan names it, and one that `echelon export` wrote records it."""

_TOLD_BY = {
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "accelerate": ("distributed_type", "fsdp_config", "compute_environment"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Hold what an import gave: what became of each key, and the run that it makes.

    `settings` are those that the file and the --set flags set, over what `extends` names.
    """

    kind: Kind
    path: Path
    extends: str | None
    rows: tuple[Row, ...]
    settings: Mapping[str, Entry]
    job: Job


def import_file(
    path: Path,
    *,
    kind: Kind | None = None,
    extends: str | None = None,
    ranks: int | None = None,
    sets: Sequence[str] = (),
) -> Imported:
    """Return the run that a configuration of another tool describes.

    It builds on `extends` (a preset or run file), with `sets` on top. ConfigError has every problem
    of the file and of the run that it would make.
    """
    text = read_text(path)
    kind = kind or told_kind(path, text)
    recorded = recorded_entries(path, text)
    if extends is None and not any(key.startswith("model.") for key in recorded):
        extends = DEFAULT_BASE[kind]
    gathered = gather(extends, ()) if extends else Gathered()
    gathered.add(recorded)
    over, problems = parse_sets(sets)
    given = keys_of(kind, path, text)
    around = surroundings(merge([*gathered.layers, over]), ranks)
    ledger = Ledger(tool=TOOLS[kind], path=str(path), given=given)
    READERS[kind](ledger, around)
    gathered.problems.extend([*problems, *ledger.problems])
    gathered.add(ledger.entries)
    gathered.add(over)
    job = resolve(gathered, run_name_of(path), None)
    return Imported(
        kind=kind,
        path=path,
        extends=extends,
        rows=(*ledger.rows, *recorded_rows(recorded)),
        settings={**recorded, **ledger.entries, **over},
        job=job,
    )


def told_kind(path: Path, text: str) -> Kind:
    """Return the kind of a file by its content; ConfigError where it does not tell."""
    if text.lstrip().startswith("{"):
        return "deepspeed"
    if re.search(r"^\s*\[(parallelism|training|activation_checkpoint)\]", text, re.MULTILINE):
        return "torchtitan"
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    if any(line.partition(":")[0] in _TOLD_BY["accelerate"] for line in lines):
        return "accelerate"
    if "--tensor-model-parallel-size" in text or "--micro-batch-size" in text:
        return "megatron"
    raise ConfigError(
        IMPORT_KIND.problem(
            f"{path} is neither a JSON object, nor a YAML with distributed_type, nor a TOML with "
            "[parallelism] or [training], nor a command of Megatron-LM",
            key="--kind",
            set_by=str(path),
            works=[f"--kind {kind}" for kind in KINDS],
        )
    )


def keys_of(kind: Kind, path: Path, text: str) -> Mapping[str, object]:
    """Return the keys of a file, with dots, and their values; ConfigError where it is not one."""
    if kind == "megatron":
        return parse_command(path, text)
    if kind == "torchtitan":
        return dict(flat(parse_toml(path, text)))
    if kind == "accelerate" and not text.lstrip().startswith("{"):
        return dict(flat(parse_yaml(path, text)))
    tables = parse_json(path, text)
    if isinstance(tables.get(TABLE), dict):
        tables = {key: value for key, value in tables.items() if key != TABLE}
    return dict(flat(tables))
