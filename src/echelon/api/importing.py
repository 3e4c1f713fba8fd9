"""`ec.import_run`: a configuration of another tool becomes a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.config.foreign.importer import Imported, Kind
    from echelon.config.foreign.ledger import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Hold the run that a foreign configuration makes, and what became of each of its keys."""

    found: Imported

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self.found.job.plan

    @property
    def rows(self) -> Sequence[Row]:
        """Return what became of each key: the setting that it is now, or why none is needed."""
        return self.found.rows

    def to_toml(self, folder: Path | None = None) -> str:
        """Return the run.toml, to stand in `folder` (or in the current one)."""
        from echelon.config.foreign.write import imported_toml

        return imported_toml(self.found, folder)

    def write(self, path: Path) -> None:
        """Write the run.toml; ConfigError where a file is there, or none can be."""
        from echelon.config.new_file import write_new

        write_new(path, self.to_toml(path.parent))


def import_run(
    path: str | Path,
    *,
    kind: Kind | None = None,
    extends: str | None = None,
    ranks: int | None = None,
    settings: Sequence[str] = (),
) -> ImportedRun:
    """Return the run that a file of DeepSpeed, Accelerate, torchtitan or Megatron-LM describes.

    It builds on `extends` (a preset or a run file: the model and the data, which such a file may
    not have), for `ranks` processes, with `settings` ("table.key=value") on top. Raises
    ConfigError, with every key that is not honoured and every rule that the run would break.
    """
    from echelon.config.foreign.importer import import_file

    return ImportedRun(
        found=import_file(Path(path), kind=kind, extends=extends, ranks=ranks, sets=settings)
    )
