"""Pipelines under measurement: cases, what is read from events, gains, verdicts, peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.catalogue import OURS
from bench.harness.hosts import one_host
from bench.harness.interleave import Options
from bench.harness.ranks import RankGroup
from bench.harness.report import Row
from bench.peers.torch_schedules import own_stages
from bench.pipeline.peers import one_f_one_b_cases, torch_case
from bench.pipeline.plans import our_case, pipeline_plan
from bench.pipeline.report import Gain, Simulated, gain_of, gains, peer_verdicts, simulation_table
from bench.pipeline.simulation import SEARCHED_FROM, automatic_rows, recorded_case
from bench.pipeline.spec import (
    NUM_MICROBATCHES,
    NUM_RANKS,
    PIPELINE_SIZES,
    STAGES_PER_RANK,
    TORCH_SCHEDULES,
    V_SHAPED,
    PipelineVariant,
    chosen_schedules,
)
from bench.pipeline.times import Step, Turn, action_times, durations, read_turn, simulated_s
from echelon.cost.seconds.unit_times import stage_durations, unit_times_from_formulas
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import Durations, simulate

TINY, EQUAL = PIPELINE_SIZES["tiny"], PIPELINE_SIZES["equal"]
BUILT = [name for name in STAGES_PER_RANK if name != "auto"]


def options_of(folder: Path) -> Options:
    """Return options of one short round, everything written into `folder`."""
    return Options(
        modes=(),
        size=PIPELINE_SIZES["tiny"],
        rounds=1,
        steps=2,
        warmup=1,
        num_peers=9,
        with_echelon=True,
        peers_home=folder / "peers",
        json=None,
        logs=folder,
    )


def _schedule(name: str) -> Schedule:
    return schedule_from_plan(
        pipeline_plan(our_case(name, PipelineVariant(schedule=name)).settings(TINY))
    )


def _turn(schedule: Schedule, durations: Durations, *, late_s: float = 0.0) -> Turn:
    """Return the turn of ranks that do what the simulator says, rank 1 later by `late_s`."""
    found = simulate(schedule, durations)
    actions = {
        Action.parse(event.name): replace(
            event, start=event.start + late_s * event.rank, end=event.end + late_s * event.rank
        )
        for event in found.events
        if event.kind != "send"
    }
    step = Step(actions=actions)
    return Turn(steps=(step, step), transfer_s=durations.transfer_s[0])


@pytest.mark.parametrize("name", BUILT)
def test_every_schedule_is_a_legal_one_of_two_ranks_and_eight_microbatches(name: str) -> None:
    assert name in SCHEDULES
    schedule = _schedule(name)
    check_schedule(schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (NUM_RANKS, NUM_MICROBATCHES)
    assert schedule.num_stages == NUM_RANKS * STAGES_PER_RANK[name]


def test_a_variant_crosses_processes_as_json() -> None:
    variant = PipelineVariant(schedule="auto", stages=((0, 1), ()), rows=("F0.0", "F1.0"))
    assert PipelineVariant.parse(str(variant)) == variant
    assert chosen_schedules("zb-h1, 1f1b") == ("zb-h1", "1f1b")
    with pytest.raises(ValueError, match="zb-h3"):
        chosen_schedules("1f1b,zb-h3")


def test_stages_of_the_usual_size_take_equally_long() -> None:
    plan = pipeline_plan(our_case("", PipelineVariant(schedule="1f1b")).settings(EQUAL))
    first, last = stage_durations(plan, unit_times_from_formulas(plan)).forward_s
    assert last == pytest.approx(first, rel=0.02)


@pytest.mark.parametrize("name", BUILT)
def test_ranks_that_do_what_is_simulated_show_no_error_and_no_lost_time(name: str) -> None:
    schedule = _schedule(name)
    uniform = Durations.uniform(schedule.num_stages, transfer_s=0.25)
    turn = _turn(schedule, uniform)
    assert simulated_s(schedule, turn) == pytest.approx(turn.span_s)
    told = Simulated.of(name, schedule, [turn])
    assert told.met
    assert told.error == pytest.approx(0)


def test_a_kind_that_was_not_run_follows_from_those_that_were() -> None:
    fused = durations({(ActionKind.F, 0): 1.0, (ActionKind.BW, 0): 3.0}, 0.0)
    assert (fused.input_gradient_s, fused.weight_gradient_s) == ((1.5,), (1.5,))
    split = durations({(ActionKind.F, 0): 1.0, (ActionKind.B, 0): 1.0, (ActionKind.W, 0): 0.5}, 0.0)
    assert split.backward_s == (1.5,)


def test_a_late_rank_is_an_error_and_the_gap_before_its_first_action() -> None:
    schedule = _schedule("1f1b")
    turn = _turn(schedule, Durations.uniform(2), late_s=6.0)
    told = Simulated.of("1f1b", schedule, [turn])
    assert told.error == pytest.approx(4.0 / 27.0)
    assert not told.met
    assert "simulated 27.000 s = +14.8%" in told.line()


def test_gains_are_set_beside_what_was_promised() -> None:
    found: list[Simulated] = []
    for name in ("1f1b", "zb-h1"):
        schedule = _schedule(name)
        found.append(Simulated.of(name, schedule, [_turn(schedule, Durations.uniform(2))]))
    (gain,) = gains(found)
    assert gain.promised > 0
    assert gain.measured == pytest.approx(gain.promised)
    assert gain.met
    assert not replace(gain, measured=0.79 * gain.promised).met
    assert gain_of(found[0], found[0]).kept == 0
    assert not Gain(label="auto", baseline="1f1b", measured=0.1, promised=0.0).met
    assert gains(found[1:]) == []
    head, _, *lines, out = simulation_table(found, {"auto": "no times"}).splitlines()
    assert "| zb-h1 |" in lines[1]
    assert {line.count("|") for line in (*lines, out)} == {head.count("|")}


def _row(label: str, step_s: float, cpu_s: float) -> Row:
    return Row(
        label=label,
        step_s=step_s,
        spread=0.0,
        cpu_s=cpu_s,
        sent_bytes=None,
        peak_bytes=1,
        first_loss=None,
        last_loss=None,
        rounds=1,
    )


def test_a_schedule_is_compared_with_the_same_one_and_the_fastest_1f1b() -> None:
    mine, same, fastest = _row(OURS, 0.96, 1.8), _row("same", 1.0, 2.0), _row("fast", 0.97, 1.9)
    verdicts = peer_verdicts(mine, same, fastest)
    assert [(one.peer, one.quantity, one.met) for one in verdicts] == [
        ("same", "wall", False),
        ("same", "CPU", True),
        ("fast", "wall", True),
        ("fast", "CPU", True),
    ]
    assert len(peer_verdicts(mine, None, fastest)) == 2


@pytest.mark.parametrize("name", BUILT)
def test_torch_has_the_same_stages_or_is_given_our_actions(name: str, tmp_path: Path) -> None:
    mine = our_case(OURS, PipelineVariant(schedule=name))
    case = torch_case(mine, options_of(tmp_path))
    if name == "dualpipe":
        assert case is None
        return
    assert case is not None
    assert case.mode == mine.mode
    schedule = _schedule(name)
    variant = PipelineVariant.parse(case.variant)
    assert bool(variant.rows) == (name not in TORCH_SCHEDULES)
    for rank in range(NUM_RANKS):
        stages = own_stages(name, rank, NUM_RANKS, STAGES_PER_RANK[name])
        assert sorted(stages) == list(schedule.stages_of(rank))
    assert (name in V_SHAPED) == (schedule.stage_ranks == (0, 1, 1, 0))


def test_every_peer_runs_1f1b_on_eight_microbatches(tmp_path: Path) -> None:
    cases = one_f_one_b_cases(options_of(tmp_path))
    assert {case.label for case in cases} == {
        "DeepSpeed PipelineModule",
        "megatron-core",
        "picotron",
    }
    assert {case.mode.microbatches for case in cases} == {NUM_MICROBATCHES}


@pytest.mark.slow
def test_the_engine_writes_what_every_rank_did(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    case = recorded_case("1f1b", PipelineVariant(schedule="1f1b"), options)
    with one_host() as host, RankGroup(case, case.settings(TINY), [host], tmp_path) as group:
        taken = group.run(warmup=1, steps=2)
    turn = read_turn(tmp_path / "events-1f1b", num_ranks=NUM_RANKS, steps=2)
    schedule = _schedule("1f1b")
    assert len(turn.steps) == 2
    assert turn.transfer_s > 0
    for step in turn.steps:
        assert set(step.actions) == {action for row in schedule.actions for action in row}
        for row in schedule.actions:
            starts = [step.actions[action].start for action in row]
            assert starts == sorted(starts)
    assert set(action_times(turn.steps)) == {
        (kind, stage) for kind in (ActionKind.F, ActionKind.BW) for stage in range(2)
    }
    assert taken.recorded_bytes is not None
    times = unit_times_from_formulas(pipeline_plan(case.settings(TINY)))
    assert taken.recorded_bytes["pp"] == 2 * NUM_MICROBATCHES * times.message_bytes


def test_the_search_is_fed_with_whole_and_split_backward_passes() -> None:
    both = [_turn(_schedule(name), Durations.uniform(2)) for name in SEARCHED_FROM]
    rows = automatic_rows(both)
    variant = PipelineVariant(schedule="auto", rows=rows)
    schedule = schedule_from_plan(pipeline_plan(our_case("auto", variant).settings(TINY)))
    check_schedule(schedule)
    fixed = simulate(_schedule("zb-h1"), Durations.uniform(2)).makespan_s
    assert simulate(schedule, Durations.uniform(2)).makespan_s <= fixed
    assert automatic_rows([]) == ()
