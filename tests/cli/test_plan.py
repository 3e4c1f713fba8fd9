"""`echelon plan` shows the numbers of `cost/`, and refuses by every rule at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.cli.plan_report import groups, plan_text
from echelon.cli.plan_rows import memory_bytes, pool_bytes, runs_of_alike, stage_rows
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes_held import bytes_held
from echelon.cost.bytes_sent import bytes_sent, bytes_sent_by_axis
from echelon.cost.unit_times import modelled_times, stage_durations
from echelon.schedule.check import check_schedule
from echelon.schedule.of_plan import schedule_of
from echelon.schedule.simulate import simulate

SPLIT = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")
FLAGS = [word for setting in SPLIT for word in ("--set", setting)]


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def _joined(text: str) -> str:
    """Return a page with its lines in one, as the sentences were before they were fitted."""
    return " ".join(text.split())


def test_json_holds_what_cost_says_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--json", *FLAGS]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(result["plan"]))
    assert plan == nano(*SPLIT)
    assert result["hash"] == plan.content_hash()
    shown: set[int] = set()
    for row in result["stages"]:
        for rank in row["ranks"]:
            shown.add(rank)
            held = {(term.name, term.pool): term.bytes for term in bytes_held(plan, rank)}
            sent = {(term.axis, term.name): term.bytes for term in bytes_sent(plan, rank)}
            assert {(t["name"], t["pool"]): t["bytes"] for t in row["held"]} == held
            assert row["sent_bytes_by_axis"] == bytes_sent_by_axis(plan, rank)
            assert {(t["axis"], t["name"]): t["bytes"] for t in row["sent_bytes_per_step"]} == sent
    assert shown == set(range(8))
    assert result["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert result["groups"]["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert result["groups"]["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert result["held_bytes_fit"] is True


def test_text_shows_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", *FLAGS, "--set", "mesh.sequence_parallel=true"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    for part in (
        "8 = pp 2 x dp_replicate 2 x tp 2, sequence parallel",
        "optimizer",
        "[0 1]  [2 3]  [4 5]  [6 7]",
        "2 (n-1)/n G s",
        "Stages: 2 2 blocks, slowest rank 1.03x of the mean (the even split), by modelled times.",
        "and 20.0 % if all stages took equally long.",
        "Ranks hold activations of at most 2 1 microbatches.",
        "A pipeline sends 8 messages of 65.54 kB in a step for each tensor rank.",
        # Backward takes twice as long as forward and a little more: attention.
        "stage 1  ....F0---B0========F1---B1",
    ):
        assert part in output.out or part in _joined(output.out)
    assert max(map(len, output.out.splitlines())) <= 80


def test_one_rank_talks_to_nobody() -> None:
    plan = nano()
    assert groups(plan) == {}
    assert "sends per step" not in plan_text(plan)
    assert "bubble" not in plan_text(plan)


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


def test_stages_that_are_alike_share_a_row() -> None:
    plan = nano("model.layers=8", "mesh.pp=4", 'model.name="deeper"')
    runs = runs_of_alike(stage_rows(plan))
    # A tied embedding makes both ends of the model differ from the middle.
    assert [[row.pp_rank for row in run] for run in runs] == [[0], [1, 2], [3]]
    text = plan_text(plan)
    assert "1-2" in text
    assert "2-5" in text


def test_a_plan_of_many_ranks_stays_readable() -> None:
    settings = (
        "cluster.preset=1024xh100",
        "mesh.pp=16",
        "mesh.tp=8",
        "mesh.dp_replicate=8",
        "batch.global_sequences=256",
        "batch.sequence_length=8192",
    )
    lines = plan_text(load_job("llama3.1-405b", settings).plan).splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 80
    assert any("(64 of 64 between nodes)" in line for line in lines)


def test_state_that_does_not_fit_is_said() -> None:
    plan = load_job("llama3-8b").plan
    assert "THIS DOES NOT FIT" in plan_text(plan)
    assert "THIS DOES NOT FIT" not in plan_text(nano())


SHARDED = ("mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.tp=2")


def test_zero_is_shown_with_its_pools_and_its_choices() -> None:
    plan = nano(
        *SHARDED, "zero.stage=3", "zero.keep_whole_below=200", 'zero.parameter_offload="host"'
    )
    text = plan_text(plan)
    for part in (
        "stage 3, slices of 1/2, gradients of microbatches add up in slices, units freed after",
        "(host)",
        "whole units of parameters",
        "zero.accumulate             whole    ",
        "zero.accumulate             slices *",
        "zero.reshard_after_forward  always *",
        "dp_shard  [0 2]  [1 3]  [4 6]  [5 7]",
        "dp_replicate  [0 4]  [1 5]  [2 6]  [3 7]",
    ):
        assert part in text or part in _joined(text), part
    assert "zero " not in plan_text(nano("mesh.tp=2"))


def test_what_was_not_chosen_is_what_that_plan_would_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [word for setting in (*SHARDED, "zero.stage=2") for word in ("--set", setting)]

    def choices(*more: str) -> dict[str, dict[str, int]]:
        assert main(["plan", "nano", "--json", *flags, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["stages"]
        return {choice.pop("value"): choice for choice in row["choices"]}

    slices, whole = choices(), choices("--set", "zero.accumulate=whole")
    assert slices["slices"].pop("chosen") > slices["whole"].pop("chosen")
    assert whole["whole"].pop("chosen") > whole["slices"].pop("chosen")
    assert slices == whole
    assert slices["slices"]["sent_bytes"] > slices["whole"]["sent_bytes"]
    assert slices["slices"]["held_bytes"] < slices["whole"]["held_bytes"]


def test_muon_is_told_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*SHARDED, "zero.stage=1", "optimizer.kind=muon")
    flags = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", "nano", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(result["plan"]))
    (row,) = result["stages"]
    sent = {rank: bytes_sent_by_axis(plan, rank)["stage"] for rank in range(8)}
    assert row["muon_bytes_by_rank"] == {str(rank): number for rank, number in sent.items()}
    assert row["sent_bytes_by_axis"]["stage"] == max(sent.values())
    assert result["groups"]["stage"] == [list(range(8))]
    assert "matrices of Muon" in plan_text(plan)


def test_what_a_step_adds_may_not_fit() -> None:
    plan = nano(*SHARDED, "zero.stage=3")
    (row,) = stage_rows(plan)
    held = memory_bytes(plan, row.held)
    device = replace(plan.cluster.device, memory_bytes=held)
    tight = replace(plan, cluster=replace(plan.cluster, device=device))
    assert "this fits, but maybe not what a step adds" in _joined(plan_text(tight))
    assert "activations come on top" in plan_text(plan)


def test_host_and_device_of_a_cpu_are_one_memory() -> None:
    plan = nano(*SHARDED, "zero.stage=1", 'zero.optimizer_offload="host"')
    (row,) = stage_rows(plan)
    assert memory_bytes(plan, row.held) == sum(term.bytes for term in row.held)
    on_gpu = replace(plan, cluster=replace(plan.cluster, backend="nccl"))
    assert memory_bytes(on_gpu, row.held) == pool_bytes(row.held, "device")


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
    schedule, durations = schedule_of(plan), stage_durations(plan, modelled_times(plan))
    assert timing["step_s"] == simulate(schedule, durations).makespan_s
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
