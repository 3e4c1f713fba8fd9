"""Import a foreign configuration that is written on the spot, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem
from echelon.interop.importer import ImportedRun, import_file, parse_keys
from echelon.interop.key_reader import KeyOutcome
from echelon.interop.tools import ToolName


class Imports:
    """Import texts from one folder, and hold each run to what its file gives when it is loaded."""

    def __init__(self, folder: Path, kind: ToolName) -> None:
        """Write into `folder` what is of this kind."""
        self.folder = folder
        self.kind: ToolName = kind

    def __call__(
        self,
        config: Mapping[str, Any] | str,
        *,
        extends: str | None = None,
        ranks: int | None = None,
        sets: Sequence[str] = (),
    ) -> ImportedRun:
        """Return an import, once every key is accounted for and its run.toml is the same run."""
        text = cleandoc(config) + "\n" if isinstance(config, str) else json.dumps(config)
        path = self.folder / "foreign"
        path.write_text(text, encoding="utf-8")
        found = import_file(path, kind=self.kind, extends=extends, ranks=ranks, sets=sets)
        written = self.folder / "foreign.toml"
        written.write_text(found.to_toml(self.folder), encoding="utf-8")
        told = {row.key.replace(".fsdp_", ".") for row in found.rows}
        given = parse_keys(self.kind, path, path.read_text(encoding="utf-8"))
        assert {key.replace(".fsdp_", ".") for key in given} <= told
        if problems := found.refused or found.invalid:
            raise ConfigError(problems)
        plan, loaded = found.job.plan, load_job(written).plan
        assert loaded.same_mathematics(plan)
        assert (loaded.layout, loaded.cluster) == (plan.layout, plan.cluster)
        return found

    def problems(self, config: Mapping[str, Any] | str, **more: Any) -> list[Problem]:
        """Return the problems of an import, none where there are none."""
        try:
            self(config, **more)
        except ConfigError as error:
            return list(error.problems)
        return []

    def refused(self, config: Mapping[str, Any] | str, **more: Any) -> list[tuple[str, str]]:
        """Return rule and place (without the file) of every problem of an import."""
        return [(p.rule, p.set_by.rpartition(": ")[2]) for p in self.problems(config, **more)]


def zero(stage: int, **keys: object) -> dict[str, Any]:
    """Return a DeepSpeed configuration with this zero_optimization."""
    return {"zero_optimization": {"stage": stage, **keys}}


def rows_of(found: ImportedRun, key: str) -> list[KeyOutcome]:
    """Return what became of one key."""
    return [row for row in found.rows if row.key == key]


def set_by(found: ImportedRun, key: str) -> dict[str, object]:
    """Return the settings that one key became."""
    return {row.setting: row.value for row in rows_of(found, key) if row.setting}
