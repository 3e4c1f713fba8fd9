"""A whole run of islands, from the command line, one of which is killed while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.faults.__main__ import ranks_of
from tests.training.loop.test_loop_faults_zero import losses, wait_for_step
from tests.training.small_runs import TINY, small_data

ISLANDS = ("mesh.dp_replicate=3", "mesh.tp=2", "batch.global_sequences=6", "local_sgd.every=5")


@pytest.mark.slow
@pytest.mark.system("B06")
def test_a_run_goes_on_without_an_island_with_a_killed_rank_and_tells_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B06: kill -9 of a rank of the first of three islands of two ranks; exit 0, and who met."""
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    kept = [one for one in TINY if one.split("=")[0] not in ("train.steps", "checkpoint.every")]
    kept = [one for one in kept if not one.startswith("batch.global_sequences")]
    sets = [*kept, *ISLANDS, "local_sgd.min_islands=2", "checkpoint.every=100"]
    sets += ["train.steps=200", "data.source=words.txt"]
    command = [sys.executable, "-m", "echelon", "train", "nano", "--json"]
    command += [word for one in sets for word in ("--set", one)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            wait_for_step(tmp_path / "runs/nano/metrics.jsonl", 7, run)
            ranks = ranks_of(run.pid)
            os.kill(ranks[1].pid, signal.SIGKILL)
            out, error = (text.decode() for text in run.communicate(timeout=400))
        finally:
            run.kill()
    assert run.returncode == 0, error
    assert "rank 1 (dp_replicate0 tp1): killed by SIGKILL" in error
    assert "island 0 (ranks 0 to 1) is left out; the run goes on with 2 of 3 islands" in error
    assert not any(one.is_running() for one in ranks)
    (absence,) = json.loads(out)["absences"]
    assert (absence["island"], absence["returned"]) == (0, True)
    first, last = absence["first_round"], absence["last_round"]
    assert sorted(losses(tmp_path)) == list(range(1, 201))
    found = [json.loads(line) for line in Path("runs/nano/metrics.jsonl").read_text().splitlines()]
    met = {one["step"] // 5: one["islands"] for one in found if "islands" in one}
    short = [number for number, islands in met.items() if islands == [1, 2]]
    assert short == list(range(first, last + 1))
    assert met[last + 1] == [0, 1, 2]
    notes = [one["text"] for one in found if one["kind"] == "note"]
    assert notes[0].startswith(f"island 0 is lost: what it did after step {5 * (first - 1)} counts")
    assert notes[1] == f"island 0 is back, and begins with step {5 * last + 1}"

    seen = subprocess.run(
        [sys.executable, "-m", "echelon", "observe", "runs/nano"],
        capture_output=True,
        check=True,
        timeout=100,
    ).stdout.decode()
    assert f"{len(short)} with fewer than 3 islands, 2 at the least" in seen
    assert notes[1] in seen
