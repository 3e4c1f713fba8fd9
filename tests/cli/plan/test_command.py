"""`echelon plan` shows the numbers of `cost/`, and refuses by every rule at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.seconds.unit_times import stage_durations, unit_times_from_formulas
from echelon.planner.report.report import plan_text
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def _joined(text: str) -> str:
    """Return a page with its lines in one, as the sentences were before they were fitted."""
    return " ".join(text.split())


@pytest.mark.parametrize(("pp", "rule"), [(2, 1 / 9), (4, 3 / 19)])
def test_few_microbatches_are_warned_of(pp: int, rule: float) -> None:
    def text(sequences: int, schedule: str = "1f1b") -> str:
        settings = (f"batch.global_sequences={sequences}", "batch.microbatch_sequences=1")
        text = plan_text(nano(f"mesh.pp={pp}", *settings, f"pipeline.schedule={schedule}"))
        return _joined(text)

    assert (
        f"warning: {4 * pp - 1} microbatches are few for {pp} ranks: with {4 * pp}, 1f1b would "
        f"wait for {100 * rule:.1f} % of a step."
    ) in text(4 * pp - 1)
    assert "warning" not in text(4 * pp)
    # A schedule that waits for less than 1F1B may have fewer.
    assert "warning" not in text(2 * pp, "zb-h2")


LAPTOP = ("cluster.preset=laptop",)
ACTIVATIONS = (
    *("cluster.preset=8xh100", "mesh.dp_shard=8", "zero.stage=3"),
    "batch.microbatch_sequences=8",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "flags"), [(LAPTOP, ()), (LAPTOP, ("--why",)), (ACTIVATIONS, ())]
)
def test_a_run_that_does_not_fit_is_a_no(
    settings: tuple[str, ...], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for text in settings for word in ("--set", text)]
    arguments = ["llama3-8b", *words, *flags]
    assert main(["plan", *arguments]) == 1
    page = capsys.readouterr().out
    assert re.match(r"does-not-fit: [\d,.]+ GiB on the fullest rank, its device has [\d.]+:", page)
    assert page.count("does-not-fit") == 1
    assert main(["plan", *arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_a_run_file_that_does_not_fit_is_a_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "llama3-8b"\n')
    assert main(["plan", str(run)]) == 1
    run.write_text('extends = "nano"\n')
    capsys.readouterr()
    assert main(["plan", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--set", "mesh.tp=3", "--set", "mesh.pp=9"]) == 2
    error = capsys.readouterr().err
    assert {"tp-divides-heads", "layers-fill-stages", "fits-cluster"} <= {
        line.split("[")[1].split("]")[0] for line in error.splitlines() if line.startswith("error[")
    }


def test_a_misspelt_setting_is_told_with_what_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "nano", "--set", "mesh.dp_replicat=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[unknown-key]")
    assert "mesh.dp_replicate" in error


def test_a_rank_with_two_stages_is_one_row_and_its_schedule_is_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = ("mesh.pp=2", "model.layers=8", "pipeline.schedule=zb-v")
    flags = [word for setting in sets for word in ("--set", setting)]
    assert main(["plan", "nano", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["stages"] for row in result["stages"]] == [[0, 3], [1, 2]]
    assert [sorted(row["blocks"]) for row in result["stages"]] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    pipeline = result["pipeline"]
    assert pipeline["stages_of_rank"] == [[0, 3], [1, 2]]
    assert pipeline["blocks"] == [2, 2, 2, 2]
    assert 1 < pipeline["imbalance"] <= pipeline["even_imbalance"]
    timing = pipeline["timing"]
    plan = nano(*sets)
    schedule, durations = (
        schedule_from_plan(plan),
        stage_durations(plan, unit_times_from_formulas(plan)),
    )
    assert timing["makespan_s"] == simulate(schedule, durations).makespan_s
    report = check_schedule(schedule)
    assert timing["peak_in_flight_of_rank"] == list(report.peak_in_flight_per_rank)
    assert timing["num_messages"] == report.num_messages
    assert main(["plan", "nano", *flags]) == 0
    text = capsys.readouterr().out
    assert "0-1, 6-7" in text
    assert "\npp 1  " in text
    assert "stages x microbatches" in text


def test_a_heavy_head_gets_fewer_blocks_and_the_plan_says_what_that_is_worth() -> None:
    sets = ("mesh.pp=2", "model.layers=8", "model.vocab=16384")
    text = plan_text(nano(*sets))
    found = re.search(
        r"Stages: (\d) (\d) blocks, slowest rank (.*)x of .* even split (.*)x,", _joined(text)
    )
    assert found is not None, text
    first, last, now, even = found.groups()
    assert int(first) > int(last)
    assert float(now) < float(even)
