"""A stage 3 run with slices in files, when a rank or the disk below it fails in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from bench.faults.__main__ import ranks_of
from echelon.cli.main import main
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.parallel.offload.file_store import FileOffloadStore
from echelon.training.checkpoint.folder import find_latest
from echelon.training.checkpoint.load import check_checkpoint
from tests.parallel.offload.test_file_store import mounted
from tests.training.small_runs import TINY, read_steps, small_data, train

LAYOUT = ("mesh.dp_shard=2", "zero.stage=3")
FILES = (*LAYOUT, "zero.optimizer_offload=nvme", "zero.parameter_offload=nvme")
END_S = 60.0
"""A run ends in seconds, which `bench.faults` measures; tests share a machine with others."""
START_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Say how a run ended, and how long after it was hit."""

    code: int
    after_s: float
    error: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with data to train on and a place for files."""
    small_data(tmp_path)
    (tmp_path / "fast").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(folder: Path, settings: Sequence[str]) -> list[str]:
    """Return the command line of a run with its slices in files; `settings` win."""
    all_of_them = [*FILES, f"zero.offload_dir={folder / 'fast'}", "data.source=words.txt", *TINY]
    keys = {setting.split("=")[0] for setting in settings}
    kept = [one for one in all_of_them if one.split("=")[0] not in keys]
    return ["train", "nano", *(word for one in (*kept, *settings) for word in ("--set", one))]


def hit(
    folder: Path, act: Callable[[list[psutil.Process]], object], *settings: str, step: int = 3
) -> Ended:
    """Train, do something to the ranks once a step is taken, and wait for the end."""
    command = [sys.executable, "-m", "echelon", *flags(folder, settings)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            wait_for_step(folder / "runs/nano/metrics.jsonl", step, run)
            ranks = ranks_of(run.pid)
            assert len(ranks) == 2
            began = time.monotonic()
            act(ranks)
            error = run.communicate(timeout=120)[1].decode()
            after_s = time.monotonic() - began
            assert psutil.wait_procs(ranks, timeout=2.0)[1] == []
        finally:
            run.kill()
    return Ended(code=run.returncode, after_s=after_s, error=error)


def wait_for_step(metrics: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    """Return once a run has taken a step."""
    deadline = time.monotonic() + START_S
    while not (metrics.is_file() and f'"step":{step},' in metrics.read_text()):
        assert time.monotonic() < deadline
        if run.poll() is not None:
            raise AssertionError(f"the run ended by itself: {run.communicate()[1].decode()}")
        time.sleep(0.02)


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss as the run wrote it."""
    lines = (folder / "runs/nano/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "step"}


@pytest.mark.system("S51")
@pytest.mark.quick("kill -9")
@pytest.mark.parametrize(
    ("fault", "rank", "rule"),
    [(signal.SIGKILL, 1, "rank-killed"), (signal.SIGSTOP, 0, "rank-stopped")],
    ids=["kill -9", "SIGSTOP"],
)
def test_a_rank_that_is_gone_ends_the_run_which_then_goes_on(
    fault: signal.Signals, rank: int, rule: str, folder: Path
) -> None:
    ended = hit(folder, lambda ranks: ranks[rank].send_signal(fault), "train.steps=100000")
    assert ended.code == 4
    assert ended.after_s < END_S
    assert f"error[{rule}]: rank {rank} (dp_shard{rank}): " in ended.error
    assert list((folder / "fast").iterdir()) == []
    latest = find_latest(folder / "runs/nano")
    assert check_checkpoint(latest.path).step == latest.step >= 2
    if fault is signal.SIGKILL:
        longer = flags(folder, [f"train.steps={latest.step + 2}"])
        assert main([*longer, "--resume", "runs/nano"]) == 0
        assert find_latest(folder / "runs/nano-2").step == latest.step + 2
        assert list((folder / "fast").iterdir()) == []


@pytest.mark.slow
def test_what_is_reserved_outlasts_a_full_disk_and_its_mount(
    folder: Path, rank_pool: RankPool
) -> None:
    fast = folder / "fast"

    def fill_and_take_away(_: object) -> None:
        space = os.statvfs(fast)
        (fast / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize))
        assert os.statvfs(fast).f_bavail == 0
        subprocess.run(["umount", "--lazy", str(fast)], check=True)

    settings = ("train.steps=30", "checkpoint.every=30")
    with mounted("size=8m", fast), mounted("size=8m", fast):  # the lower one is unmounted at last
        ended = hit(folder, fill_and_take_away, *settings)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(fast)], check=True)
    assert ended.code == 0, ended.error
    train(rank_pool, folder / "at hand", folder / "data", (*LAYOUT, *settings))
    expected = read_steps(folder / "at hand")
    assert losses(folder) == {step: values[0] for step, values in expected.items()}


@pytest.mark.slow
def test_a_file_that_is_cut_short_ends_the_run(folder: Path) -> None:
    fast = folder / "fast"

    def cut(ranks: list[psutil.Process]) -> None:
        for file in files_in(fast, ranks[1]):
            os.truncate(file, 0)

    ended = hit(folder, cut, "train.steps=100000", "checkpoint.every=100000")
    assert ended.code == 3
    assert ended.after_s < END_S
    assert ended.error.count("error[") == 1
    assert "error[offload-file-works]: rank 1: " in ended.error
    # A write that was under way when the file was cut may have put a few pages back.
    assert re.search(rf"in {fast} failed: the file ends at byte \d+ \(EIO\)", ended.error)


def files_in(folder: Path, rank: psutil.Process, count: int = 2) -> list[Path]:
    """Return the nameless files that a rank has open in a folder: parameters, optimizer state."""
    open_files = Path(f"/proc/{rank.pid}/fd")
    found: dict[str, Path] = {}
    # A view of a part of a file has a descriptor of its own, which comes later.
    for number in sorted(map(int, os.listdir(open_files))):
        with suppress(FileNotFoundError):
            target = os.readlink(open_files / str(number))
            if target.startswith(str(folder)):
                found.setdefault(target, open_files / str(number))
    assert len(found) == count
    return list(found.values())


@contextmanager
def device(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Mount a disk whose content is a file; yield the mount and the file, or skip the test."""
    with ExitStack() as undo:
        image, place = folder / "disk", folder / "fast"
        with image.open("wb") as file:
            file.truncate(32 * 2**20)
        steps = [
            (["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], None),
            (["mount", "-o", "loop", str(image), str(place)], ["umount", "--lazy", str(place)]),
        ]
        for do, back in steps:
            try:
                subprocess.run(do, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"needs the right to mount a file as a disk: {error}")
            if back is not None:
                undo.callback(subprocess.run, back, check=True)
        yield place, image


@pytest.mark.slow
def test_a_disk_that_goes_away_ends_the_run(folder: Path) -> None:
    with device(folder) as (place, image):
        ended = hit(
            folder, lambda _: os.truncate(image, 0), "train.steps=100000", "checkpoint.every=100000"
        )
    assert ended.code == 3, ended.error
    assert ended.after_s < END_S
    assert ended.error.count("error[") == 1
    assert "error[offload-file-works]: rank " in ended.error
    assert f"in {place} failed: Input/output error (EIO)" in ended.error


def read_what_is_cut_off(context: RankContext, folder: str) -> None:
    """Look at a key in a file, as a save does, while the file is cut short."""
    rest = FileOffloadStore(Path(folder), context.rank, 2)
    rest.add("a", 1024, torch.float32)
    view = rest.view("a")
    for file in files_in(Path(folder), psutil.Process(), count=1):
        os.truncate(file, 0)
    float(view.sum())


def test_a_mapped_file_that_is_cut_short_is_told_as_such(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    with pytest.raises(RankFailure) as failure:
        rank_pool.run(f"{__name__}:read_what_is_cut_off", str(tmp_path))
    (problem,) = failure.value.problems
    assert problem.rule == "rank-killed"
    assert problem.message.startswith("rank 0: killed by SIGBUS (a file that it reads as memory, ")
    assert "zero.offload_dir" in problem.message
