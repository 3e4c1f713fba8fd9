"""A save that fails says why on every rank, and leaves what was committed before as it was."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import CheckpointError, EchelonError, EnvironmentProblem
from echelon.training.checkpoint import save as save_module
from echelon.training.checkpoint import shard_file
from echelon.training.checkpoint.folder import clean_leftovers, find_latest, list_checkpoints
from echelon.training.checkpoint.load import check_checkpoint
from tests.training.checkpoint.ranks import assert_same, load, make_tensors, save


def _refuse(code: int) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def _survives(directory: Path, error: type[EchelonError], rule: str) -> EchelonError:
    """Save step 2, expect `rule`, and see that step 1 is whole and nothing else is left."""
    with pytest.raises(error) as caught:
        save(directory, step=2)
    assert caught.value.rules == (rule,)
    assert [path.name for path in directory.iterdir()] == ["step-000001"]
    loaded, _ = load(directory / "step-000001", like=make_tensors())
    assert_same(loaded, make_tensors(1))
    return caught.value


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (errno.ENOSPC, "disk-space"),
        (errno.EDQUOT, "disk-space"),
        (errno.EROFS, "folder-writable"),
        (errno.EACCES, "folder-writable"),
        (errno.EIO, "disk-works"),
    ],
)
@pytest.mark.parametrize("moment", ["write", "index", "commit", "begin"])
def test_a_refusal_of_the_disk_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, rule: str, moment: str
) -> None:
    save(tmp_path, step=1)
    where: dict[str, tuple[object, str]] = {
        "write": (shard_file, "flush_file"),
        "index": (save_module, "write_durably"),
        "commit": (Path, "rename"),
        "begin": (Path, "mkdir"),
    }
    monkeypatch.setattr(*where[moment], _refuse(code))
    error = _survives(tmp_path, EnvironmentProblem, rule)
    assert error.exit_code == 3
    assert os.strerror(code) in str(error)
    monkeypatch.undo()
    save(tmp_path, step=2)
    assert find_latest_step(tmp_path) == 2


def find_latest_step(directory: Path) -> int:
    """Return the newest step, checked."""
    return check_checkpoint(list_checkpoints(directory)[-1].path).step


def test_a_disk_that_is_full_for_one_rank_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)
    whole = shard_file.flush_folder
    calls: list[Path] = []

    def refuse_once(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path)

    monkeypatch.setattr(shard_file, "flush_folder", refuse_once)
    _survives(tmp_path, EnvironmentProblem, "disk-space")
    assert len(calls) == 2


@pytest.mark.slow
def test_a_limit_of_the_system_on_file_size(tmp_path: Path) -> None:
    """Meet a real refusal: the kernel lets no file of this process grow beyond 4 KiB."""
    save(tmp_path, step=1)
    code = """
import resource, sys
from pathlib import Path
from echelon.core.errors import EnvironmentProblem
from tests.training.checkpoint.ranks import save
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save(Path(sys.argv[1]), step=2)
except EnvironmentProblem as error:
    print(error.rules[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "disk-space", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert find_latest_step(tmp_path) == 1


def test_a_saved_step_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, step=1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, step=1, tensors=make_tensors(99))
    assert caught.value.rules == ("checkpoint-written-once",)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda shape, *_: [((0,) * len(shape), shape)], "overlap"),
        (
            lambda shape, rank, _: [((0,) * len(shape), (1, *shape[1:]))] if not rank else [],
            "1 piece holds",
        ),
    ],
)
def test_shards_that_are_not_the_whole_model(
    tmp_path: Path, cut: Callable[..., Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        save(tmp_path, cut=cut)
    assert caught.value.rules == ("checkpoint-covers-tensors",)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_ranks_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_module.write_shard_file

    def write_elsewhere(folder: Path, file: str, shards: Any) -> Any:
        if file != "rank-0001.safetensors":
            return whole(folder, file, shards)
        other = tmp_path / "host1"
        other.mkdir()
        return whole(other, file, shards)

    monkeypatch.setattr(save_module, "write_shard_file", write_elsewhere)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "checkpoints")
    assert caught.value.rules == ("checkpoint-shared-folder",)
    assert "rank-0001.safetensors" in str(caught.value)
    assert "nothing seen" in str(caught.value)


def test_old_checkpoints_go_only_after_the_new_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1, keep=1)
    monkeypatch.setattr(save_module, "write_durably", _refuse(errno.ENOSPC))
    with pytest.raises(EnvironmentProblem):
        save(tmp_path, step=2, keep=1)
    assert find_latest_step(tmp_path) == 1
    monkeypatch.undo()
    save(tmp_path, step=2, keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2]


def test_leftovers_of_killed_writers_are_ignored_and_cleaned(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(directory, step=1)
    for name in (".tmp-step-000002-0123456789ab", ".old-step-000000-ba9876543210"):
        (directory / name).mkdir()
        (directory / name / "rank-0000.safetensors").write_bytes(b"half")
    (directory / "notes.txt").write_text("mine")
    # A checkpoint that was moved and linked back, the link of which was being removed.
    (directory / ".old-step-000000-0123456789ab").symlink_to(tmp_path, target_is_directory=True)
    assert find_latest(tmp_path).step == 1
    assert len(clean_leftovers(directory)) == 3
    assert sorted(path.name for path in directory.iterdir()) == ["notes.txt", "step-000001"]
    assert clean_leftovers(tmp_path / "nowhere") == ()


def test_everything_is_flushed_before_the_rename_and_removed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not lose what the system has not written yet; a power cut does."""
    save(tmp_path, step=1, world_size=1)
    done: list[str] = []
    flush, rename = os.fsync, os.rename

    def noted_flush(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        done.append("flush " + re.sub(r"-[0-9a-f]{12}$", "", name))
        flush(descriptor)

    def noted_rename(old: Path, new: Path) -> None:
        done.append(f"rename to {re.sub(r'-[0-9a-f]{12}$', '', Path(new).name)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_flush)
    monkeypatch.setattr(os, "rename", noted_rename)
    save(tmp_path, step=2, world_size=1, keep=1)
    assert done == [
        "flush rank-0000.safetensors",
        "flush .tmp-step-000002",
        "flush state.json",
        "flush index.json",
        "flush .tmp-step-000002",
        "rename to step-000002",
        f"flush {tmp_path.name}",
        "rename to .old-step-000001",
        f"flush {tmp_path.name}",
    ]
