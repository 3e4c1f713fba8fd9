"""What `echelon config show` prints: every resolved setting with its source, also as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from echelon.config.job import Job, ResolvedSetting
from echelon.config.kinds import toml_text
from echelon.config.pipeline import AUTO, SCHEDULE_KEY, TIMES_KEY
from echelon.config.presets import about, preset_names, read_preset
from echelon.config.schema import MODEL_SOURCES

SCHEMA = 1


def setting_rows(job: Job) -> Sequence[ResolvedSetting]:
    """Return key, value and source of every setting, in the order of a run file."""
    return job.sources


def settings_json(job: Job) -> dict[str, object]:
    """Return every setting with its source, and the hashes, as one versioned JSON object."""
    return {
        "schema": SCHEMA,
        "plan_hash": job.plan.content_hash(),
        "job_hash": job.content_hash(),
        "settings": {
            row.key: {"value": tomllib.loads(f"v = {row.value}")["v"], "source": row.source}
            for row in job.sources
        },
    }


def resolved_toml(job: Job, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a run.toml that gives this very job without presets of models or config.json.

    Stages are written out, so the times that they were balanced by are left out where nothing else
    reads them: a setting without effect is an error. The values of `instead` are written for those
    settings, as they stand in TOML.
    """
    return "\n".join(_toml_lines(job, instead)) + "\n"


def _toml_lines(job: Job, instead: Mapping[str, str]) -> Iterator[str]:
    tables: dict[str, list[str]] = {}
    values = {row.key: row.value for row in job.sources} | dict(instead)
    left_out = [*MODEL_SOURCES]
    if values[SCHEDULE_KEY] != toml_text(AUTO):
        left_out.append(TIMES_KEY)
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        if key not in left_out:
            tables.setdefault(table, []).append(f"{name} = {value}")
    for number, (table, lines) in enumerate(tables.items()):
        yield from ([""] if number else [])
        yield f"[{table}]"
        yield from lines


def preset_rows() -> tuple[tuple[str, str, str], ...]:
    """Return kind, name and one line about every preset."""
    rows: list[tuple[str, str, str]] = []
    for kind in ("runs", "models", "clusters"):
        for name in preset_names(kind):
            preset = read_preset(kind, name)
            assert preset is not None
            rows.append((kind.removesuffix("s"), name, about(preset)))
    return tuple(rows)
