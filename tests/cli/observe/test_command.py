"""`echelon observe`: what a run did, its schedule as text, SVG and JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from echelon.cli import observe as observe_command
from echelon.cli.main import main
from echelon.telemetry.bubble import IdleCause
from echelon.telemetry.summary import RunSummary
from echelon.telemetry.timeline import MEASURED, PLANNED, trace_path
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run
from tests.telemetry.runs import names_by_track, plain_events, read_trace

TIMES = stage_times(1.0, 1.5, transfer_s=0.125)
TINY = (
    "mesh.pp=2",
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=8",
    "batch.microbatch_sequences=2",
    "optimizer.warmup_steps=2",
    "train.steps=4",
    "train.validate_every=2",
    "train.run_name=tiny",
    "data.source=words.txt",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run of four steps on two ranks, of which nothing was traced yet."""
    return write_run(tmp_path, plan_of(), [{step: TIMES for step in range(1, 5)}]).path


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["observe", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_both_timelines_stand_one_above_the_other(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", str(run), "--schedule"]) == 0
    text = capsys.readouterr().out
    planned, measured = text.index("\nplanned: simulated"), text.index("\nmeasured: step 4")
    assert planned < measured
    drawing = text[planned:measured].splitlines()[2:]
    assert [line.split()[0] for line in drawing] == ["rank", "pp", "rank", "pp", "0"]
    # The run was written from the same simulation, and only clocks may be off.
    same = text[measured:].splitlines()[2 : 2 + len(drawing)]
    assert [line[:8] for line in same] == [line[:8] for line in drawing]
    for cause in IdleCause:
        assert text.count(f"  {cause.value}") >= 2, "in the bubble of each"
    assert "\nclocks    aligned by messages, to +- " in text
    assert "median of steps 2, 3, 4 / simulated = 1.0" in text
    assert trace_path(run, PLANNED).is_file()
    assert trace_path(run, MEASURED).is_file()


def test_a_step_is_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["observe", str(run), "--schedule", "--step", "2"]) == 0
    assert "\nmeasured: step 2\n" in capsys.readouterr().out
    err = _refusal([str(run), "--schedule", "--step", "7"], capsys)
    assert err.startswith("error[step-recorded]")
    assert "it has steps 1 to 4" in err


def test_json_gives_seconds_by_rank_and_cause(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", str(run), "--schedule", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["command"], result["step"]) == (1, "observe", 4)
    assert result["ratio"] == pytest.approx(1.0, abs=0.05)
    for side in ("planned", "measured"):
        bubble = result[side]
        assert sum(bubble["by_cause"].values()) == pytest.approx(bubble["bubble"])
        assert [rank["rank"] for rank in bubble["ranks"]] == [0, 1]
        assert set(bubble["ranks"][0]["idle_s"]) == {cause.value for cause in IdleCause}
    assert all(Path(trace).is_file() for trace in result["traces"])


def test_a_figure_is_written_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "run.svg"
    assert main(["observe", str(run), "--schedule", "--out", str(figure)]) == 0
    text = figure.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "planned: simulated" in text
    assert "measured: step 4" in text
    capsys.readouterr()
    err = _refusal([str(run), "--schedule", "--out", str(figure)], capsys)
    assert err.startswith("error[never-overwrite]")
    assert figure.read_text() == text


def test_without_schedule_it_says_what_became_of_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = _refusal([str(run), "--svg", "x.svg"], capsys)
    assert err.startswith("error[unknown-flag]")
    assert f"observe {run} --out x.svg" in err
    assert not trace_path(run, MEASURED).exists()


def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error[run-exists]" in _refusal([str(tmp_path / "nano"), "--schedule"], capsys)
    alone = write_run(tmp_path / "alone", plan_of(pp=1), [{1: stage_times(1.0)}]).path
    assert "error[run-is-pipelined]" in _refusal([str(alone), "--schedule"], capsys)
    for rank in (0, 1):
        plain_events(run, rank).unlink()
    assert "error[run-has-events]" in _refusal([str(run), "--schedule"], capsys)


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    (tmp_path / "empty").mkdir()
    broken = write_run(tmp_path / "broken", plan_of(), [{1: TIMES}]).path
    (broken / "plan.json").write_text("{}")
    nowhere = write_run(tmp_path / "nowhere", plan_of(), [{1: TIMES}]).path
    plan = (nowhere / "plan.json").read_text()
    (nowhere / "plan.json").write_text(plan.replace('"tp": 1', '"tp": 0'))
    missing = tmp_path / "none", tmp_path / ("x" * 5000)
    for path in (file, tmp_path / "empty", broken, nowhere, *missing):
        for flags in ([], ["--schedule"]):
            err = _refusal([str(path), *flags], capsys)
            assert err.startswith("error[run-exists]")
            assert err.count("error[") == 1


def test_steps_that_were_not_recorded_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = write_run(tmp_path / "none", plan_of(), [{}]).path
    err = _refusal([str(none), "--schedule"], capsys)
    assert err.startswith("error[step-recorded]: no whole step of ")
    starts = [{1: TIMES, 2: TIMES}, {3: TIMES}]
    killed = write_run(tmp_path / "killed", plan_of(), starts, silent=[(), (1,)]).path
    err = _refusal([str(killed), "--schedule"], capsys)
    assert err.startswith("error[step-recorded]: step 3 of ")
    assert "it has steps 1 to 2" in err
    assert main(["observe", str(killed), "--schedule", "--step", "2"]) == 0
    assert "\nmeasured: step 2\n" in capsys.readouterr().out


def test_a_damaged_run_is_refused_by_file_and_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "events.rank-0001 copy.jsonl").write_text("what is no rank's is not read\n")
    assert main(["observe", str(run), "--schedule"]) == 0
    capsys.readouterr()
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind":"step"}\n')
    for flags in ([], ["--schedule"]):
        err = _refusal([str(run), *flags], capsys)
        assert err.startswith(f"error[events-readable]: {metrics} line 6: has no step")


def test_it_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from echelon.cli.main import main; "
        f"main(['observe', {str(run)!r}, '--schedule']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_run_of_ranks_leaves_both_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (tmp_path / "words.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nano", *(word for text in TINY for word in ("--set", text))]) == 0
    folder = Path("runs/tiny")
    planned, measured = (read_trace(trace_path(folder, name)) for name in (PLANNED, MEASURED))
    assert names_by_track(measured) == names_by_track(planned)
    assert {track for _, track in names_by_track(measured)} == {"compute", "pp"}
    assert measured["otherData"]["steps"] == "2, 3, 4"
    capsys.readouterr()
    assert main(["observe", str(folder), "--schedule", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == [2, 3, 4]
    assert result["simulated_s"] > 0
    for rank in result["measured"]["ranks"]:
        assert rank["busy_s"] > 0
        # What was recorded is one thread of one rank: it does nothing twice at a time.
        assert min(rank["idle_s"].values()) >= -1e-9
    assert main(["observe", str(folder)]) == 0
    assert "steps       4 of 4\n" in capsys.readouterr().out


def test_pages_are_as_wide_as_the_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (60, 80, 120, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["observe", str(run), "--schedule"]) == 0
        longest = max(capsys.readouterr().out.splitlines(), key=len)
        # The path of the traces is one word, as long as it is.
        assert len(longest) <= columns or str(run) in longest, longest
        assert len(longest) > columns - 20


def test_what_a_run_did_stays_within_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {item.name: None for item in fields(RunSummary)}
    counts = {"starts": 1, "steps": 400, "total_steps": 400, "tokens": 1, "num_validations": 0}
    saved = tuple(range(10, 401, 10))
    values |= {
        **counts,
        "name": "a-run",
        "plan_hash": "0123",
        "checkpoints": saved,
        "staleness": (),
        "notes": (),
        "mirrors": (),
    }
    summary = RunSummary(**values)  # type: ignore[arg-type]
    monkeypatch.setattr(observe_command, "observe_run", lambda run: summary)
    for columns in (60, 80, 120, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["observe", "a-run"]) == 0
        text = capsys.readouterr().out
        assert columns - 12 < max(map(len, text.splitlines())) <= columns
        assert ", ".join(map(str, saved)) in " ".join(text.split())
