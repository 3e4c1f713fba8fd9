"""`echelon rehearse`: its page, its JSON and file, and what is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.rehearse import MOST_RANKS, REHEARSAL_FILE, rehearsal_text
from echelon.core.rulebook.planner import REHEARSE_MISSING
from echelon.parallel.zero import ParameterGathering
from echelon.rehearsal.run import (
    Rehearsal,
    RehearsalFault,
    on_nccl,
    rehearse,
    with_few_microbatches,
)
from tests.rehearsal.test_run import plan_of


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_rehearsed_and_a_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "nano", "--set", "mesh.tp=2", "--workers", "1"]) == 0
    page = capsys.readouterr().out
    assert "nano: 2 ranks under NCCL, without a GPU" in page
    assert "2 distinct ranks rehearsed" in page
    assert "planned peak" in page
    assert "bytes sent by axis: tp" in page
    assert "holds: " in page
    assert max(map(len, page.splitlines())) <= 80


def test_everything_is_in_the_json_and_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--set", "mesh.pp=2", "--workers", "1", "--json", "--out", "found.json"]
    assert main(["rehearse", "nano", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["rehearsal"]
    assert json.loads(Path("found.json").read_text(encoding="utf-8")) == found
    assert found["holds"]
    assert found["faults"] == []
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["sent_bytes"] == rank["planned_sent_bytes"]
        assert rank["work"]["F"]["kernels"] > 0
        assert len(rank["curve"]) == 2 * found["microbatches"]["rehearsed"]


def test_a_fault_is_an_error_with_its_rule_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParameterGathering, "_await", lambda self, bucket: None)
    flags = ["--set", "mesh.dp_shard=2", "--set", "zero.stage=3", "--workers", "1"]
    assert main(["rehearse", "nano", *flags]) == 1
    said = capsys.readouterr()
    assert "DOES NOT HOLD" in said.out
    assert "error[rehearse-missing-wait]" in said.err
    assert "parameters.bucket" in said.err


def test_what_is_recommended_for_a_model_is_rehearsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--cluster", "2xh100", "--set", "batch.global_sequences=2", "--workers", "1"]
    assert main(["rehearse", "gpt2", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rehearsal"]
    assert found["world_size"] == 2


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["nosuch"], "unknown-preset"),
        (["nano", "--set", "mesh.tp=3"], "tp-divides"),
        (["nano", "--workers", "0"], "bad-argument"),
        (["nano", "--out", "there.json"], "never-overwrite"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    flags: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.json").write_text("mine", encoding="utf-8")
    assert main(["rehearse", *flags]) == 2
    assert f"error[{rule}" in capsys.readouterr().err
    assert Path("there.json").read_text(encoding="utf-8") == "mine"


@pytest.fixture(scope="module")
def found() -> Rehearsal:
    flags = ("mesh.pp=2", "model.layers=4", "batch.global_sequences=64")
    return rehearse(plan_of(*flags), workers=1)


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_a_page_fits(found: Rehearsal, columns: int) -> None:
    page = rehearsal_text(found, columns=columns)
    assert max(map(len, page.splitlines())) <= columns
    assert "holds:" in page


def test_what_was_rehearsed_and_what_a_step_has_are_said(found: Rehearsal) -> None:
    page = " ".join(rehearsal_text(found, columns=100).split())
    assert f"two steps of {found.plan.num_microbatches} of {found.num_microbatches}" in page
    assert "1 distinct rank rehearsed" in rehearsal_text(
        replace(found, ranks=found.ranks[:1]), columns=100
    )


def test_the_fullest_ranks_are_shown(found: Rehearsal) -> None:
    more = replace(found, ranks=found.ranks * MOST_RANKS)
    page = rehearsal_text(more, columns=100)
    assert sum("pp0" in line or "pp1" in line for line in page.splitlines()) == MOST_RANKS


def test_faults_are_counted(found: Rehearsal) -> None:
    fault = RehearsalFault(rule=REHEARSE_MISSING, ranks=(), text="a call is missing")
    page = rehearsal_text(replace(found, faults=(fault,)), columns=100)
    assert "DOES NOT HOLD: 1 fault" in page
    assert "holds:" not in page


def test_a_trace_of_each_distinct_rank_is_written_into_a_new_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--set", "mesh.pp=2", "--workers", "1", "--out", "traces/rank.json.gz"]
    assert main(["rehearse", "nano", *flags]) == 0
    files = sorted(Path("traces").iterdir())
    assert [file.name for file in files] == ["rank-0000.json.gz", "rank-0001.json.gz"]
    for rank, file in enumerate(files):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        assert trace["otherData"]["rank"] == rank
    kept = [file.read_bytes() for file in files]
    capsys.readouterr()
    assert main(["rehearse", "nano", *flags]) == 2
    assert "error[never-overwrite]" in capsys.readouterr().err
    assert [file.read_bytes() for file in files] == kept


def test_of_a_run_folder_the_rehearsal_stands_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    plan = plan_of("mesh.tp=2")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    assert main(["rehearse", "runs/one", "--workers", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["rehearsal"]
    assert json.loads((folder / REHEARSAL_FILE).read_text(encoding="utf-8")) == printed
    assert printed["plan_hash"] == with_few_microbatches(on_nccl(plan)).content_hash()
    assert sorted(file.name for file in folder.iterdir()) == ["plan.json", REHEARSAL_FILE]
