# SPDX-License-Identifier: Apache-2.0
"""The checkpoints folder of a run: what is committed, what is left over, what may go. No torch.

`step-000500` is a committed checkpoint. `.tmp-step-000500-<nonce>` is one that is being written,
`.old-...` one that is being removed; both are nothing to anyone but their writer. `base` holds what
never changes, for all of them, and stays.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from echelon.core.disk import disk_errors, flush_folder, list_names
from echelon.core.errors import CheckpointError
from echelon.core.rulebook.run import CHECKPOINT_EXISTS
from echelon.training.checkpoint.index import BASE_FOLDER, INDEX_FILE, base_of, read_index

CHECKPOINTS = "checkpoints"
Keep = int | Literal["all"]

_COMMITTED = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(rf"\.(tmp|old)-(step-\d{{6,}}|{BASE_FOLDER})-[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Name a committed checkpoint."""

    step: int
    path: Path


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is, or will be, in a checkpoints folder."""
    return directory / f"step-{step:06d}"


def new_temporary(final: Path) -> Path:
    """Return a name to write the folder `final` under, until it is committed."""
    return final.with_name(f".tmp-{final.name}-{uuid4().hex[:12]}")


def list_checkpoints(directory: Path) -> tuple[StoredCheckpoint, ...]:
    """Return the committed checkpoints of a checkpoints folder, oldest step first."""
    if not directory.is_dir():
        return ()
    found: list[StoredCheckpoint] = []
    for path in directory.iterdir():
        match = _COMMITTED.fullmatch(path.name)
        if match and path.is_dir():
            found.append(StoredCheckpoint(step=int(match[1]), path=path))
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))


def other_checkpoints(path: Path) -> list[Path]:
    """Return the other committed checkpoints in the folder of `path`, the newest first."""
    return [other.path for other in list_checkpoints(path.parent) if other.path != path][::-1]


def find_latest(run_dir: Path) -> StoredCheckpoint:
    """Return the newest committed checkpoint of a run; CheckpointError lists what is there."""
    directory = run_dir / CHECKPOINTS
    found = list_checkpoints(directory)
    if not found:
        seen = list_names(directory if directory.is_dir() else run_dir)
        raise CheckpointError(
            CHECKPOINT_EXISTS.problem(
                f"{run_dir} has no committed checkpoint: {seen}",
                suggestions=_runs_near(run_dir) or ("without --resume",),
            )
        )
    return found[-1]


def find_checkpoint(path: Path) -> StoredCheckpoint:
    """Return the checkpoint at `path`: the folder of a run (its newest) or of one checkpoint."""
    match, leftover = _COMMITTED.fullmatch(path.name), _LEFTOVER.fullmatch(path.name)
    if not leftover and path.name != BASE_FOLDER and (path / INDEX_FILE).is_file():
        return StoredCheckpoint(step=read_index(path).step, path=path)
    if match or leftover or (path.name == BASE_FOLDER and (path / INDEX_FILE).is_file()):
        others = list_checkpoints(path.parent)
        state = "was never committed" if path.is_dir() else "does not exist"
        if path.name == BASE_FOLDER:
            state = "holds the frozen weights below checkpoints, and is none"
        raise CheckpointError(
            CHECKPOINT_EXISTS.problem(
                f"{path} {state}: {list_names(path.parent)}", suggestions=[c.path for c in others]
            )
        )
    return find_latest(path.parent if path.name == CHECKPOINTS else path)


def clean_leftovers(directory: Path) -> tuple[Path, ...]:
    """Remove what killed writers left behind; only for who holds the lock of the run."""
    if not directory.is_dir():
        return ()
    leftovers = [path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        with disk_errors(f"to remove {path}"):
            _remove(path)
    return tuple(sorted(leftovers))


def prune(directory: Path, *, newest: int, keep: Keep) -> tuple[Path, ...]:
    """Remove all but the `keep` newest checkpoints up to the step `newest`, just committed.

    Later steps stay: they are of a longer run that this one was resumed from. A checkpoint is
    renamed before it is removed, so that a kill never leaves half of one under its own name.
    """
    if keep == "all":
        return ()
    old = [c for c in list_checkpoints(directory) if c.step < newest]
    removed = [checkpoint.path for checkpoint in old[: max(0, len(old) - (keep - 1))]]
    for path in removed:
        remove_committed(path)
    return tuple(removed)


def remove_unused_base(folder: Path) -> bool:
    """Remove a base that no checkpoint beside it names; return whether it is gone."""
    if any(base_of(one.path) is not None for one in list_checkpoints(folder.parent)):
        return False
    remove_committed(folder)
    return True


def remove_committed(path: Path) -> None:
    """Rename a folder away, then remove it; EnvironmentProblem where the disk refuses."""
    with disk_errors(f"to remove the old checkpoint {path}"):
        doomed = path.rename(path.with_name(f".old-{path.name}-{uuid4().hex[:12]}"))
        flush_folder(path.parent)
        _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a checkpoint; one that was moved and linked back loses its link and stays there."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _runs_near(run_dir: Path) -> list[Path]:
    """Return runs with a checkpoint in this folder, else beside it."""
    for folder in (run_dir, run_dir.parent):
        inside = folder.iterdir() if folder.is_dir() else ()
        runs = [path for path in inside if list_checkpoints(path / CHECKPOINTS)]
        if runs:
            return sorted(runs)[:6]
    return []
