"""Numbers of a plan and of its ranks; each wrong one ends `echelon rehearse`, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.core.event import EventList
from echelon.cost.bytes import all_reduce, context_sent, expert_sent, sent
from echelon.cost.peak import rank_peak
from echelon.cost.peak.buckets import GradientSums, WholeUnits
from echelon.rehearsal import numbers
from echelon.rehearsal.run import rehearse
from echelon.schedule import check
from echelon.schedule.action import Action, ActionKind
from tests.rehearsal.test_run import plan_of

TWO_NODES = f"cluster.file={Path(__file__).parents[2] / 'examples' / 'two-nodes.toml'}"
NODES = (TWO_NODES, "mesh.dp_shard=4", "zero.stage=3")
HYBRID = (TWO_NODES, "mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=2")
EXPERTS = ("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=96")
PIPE = ("mesh.pp=2", "model.layers=4", "pipeline.schedule=zb-h1", "batch.global_sequences=8")
ACROSS = (*PIPE, TWO_NODES, "mesh.dp_replicate=2")

ROWS = (
    "F0.0, F0.1, F0.2, B0.0, W0.0, B0.1, F0.3, B0.2, B0.3, W0.1, W0.2, W0.3",
    "F1.0, B1.0, F1.1, B1.1, F1.2, B1.2, W1.0, F1.3, B1.3, W1.1, W1.2, W1.3",
)
"""A schedule of a user, whose W come late."""

Plant = Callable[[pytest.MonkeyPatch], None]


def _swapped_slices(patch: pytest.MonkeyPatch) -> None:
    right = all_reduce.SumGroup.slice_bytes_by_tier
    patch.setattr(
        all_reduce.SumGroup, "slice_bytes_by_tier", lambda self, piece: right(self, piece)[::-1]
    )


def _swapped_sums(patch: pytest.MonkeyPatch) -> None:
    right = all_reduce.SumGroup.bytes_by_tier
    patch.setattr(
        all_reduce.SumGroup, "bytes_by_tier", lambda self, *sizes: right(self, *sizes)[::-1]
    )


def _all_pairs_far(patch: pytest.MonkeyPatch) -> None:
    right = sent.pairs_sent
    patch.setattr(sent, "pairs_sent", lambda *given: (right(*given)[0],) * 2)


def _all_messages_near(patch: pytest.MonkeyPatch) -> None:
    right = sent.pipeline_bytes
    patch.setattr(
        sent,
        "pipeline_bytes",
        lambda *given: tuple(replace(term, far=0) for term in right(*given)),
    )


def _keys_stay_near(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context_sent, "num_elsewhere", lambda *_: 0)


def _tokens_stay_near(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(expert_sent, "num_elsewhere", lambda *_: 0)


def _message_too_many(patch: pytest.MonkeyPatch) -> None:
    right = sent.messages_from_plan

    def counted(*given: Any) -> Any:
        activations, gradients = right(*given)
        return activations + type(activations)(list(activations)[:1]), gradients

    patch.setattr(sent, "messages_from_plan", counted)


def _no_whole_units(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WholeUnits, "bytes", 0)


def _no_filling_buckets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientSums, "write", lambda self, name, count=1: None)


def _no_bound_of(name: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = numbers.transient_terms
        patch.setattr(
            numbers,
            "transient_terms",
            lambda *given: tuple(term for term in right(*given) if term.name != name),
        )

    return plant


def _no_offload_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_peak, "offload_buffer_bytes", lambda *_: 0)


def _no_masters(patch: pytest.MonkeyPatch) -> None:
    right = rank_peak.held_terms
    patch.setattr(
        rank_peak,
        "held_terms",
        lambda *given: tuple(term for term in right(*given) if "master" not in term.name),
    )


def _one_more_held(patch: pytest.MonkeyPatch) -> None:
    right = numbers.peak_in_flight
    patch.setattr(numbers, "peak_in_flight", lambda actions: right(actions) + 1)


def _freed_at_b(patch: pytest.MonkeyPatch) -> None:
    """Count activations as free when B has ended, though W still reads them."""
    right = check._held

    def early(actions: Any) -> list[int]:
        fused = [
            replace(action, kind=ActionKind.BW) if action.kind is ActionKind.B else action
            for action in actions
            if action.kind is not ActionKind.W
        ]
        return right(fused)

    patch.setattr(check, "_held", early)


def _other_order(patch: pytest.MonkeyPatch) -> None:
    right = numbers.schedule_from_plan

    def turned(plan: Any) -> Any:
        schedule = right(plan)
        rows = tuple((*row[:-2], row[-1], row[-2]) for row in schedule.actions)
        return replace(schedule, actions=rows)

    patch.setattr(numbers, "schedule_from_plan", turned)


def _one_weight_gradient_more(patch: pytest.MonkeyPatch) -> None:
    right = numbers.schedule_from_plan

    def longer(plan: Any) -> Any:
        schedule = right(plan)
        last = Action(ActionKind.W, 0, 0)
        return replace(schedule, actions=((*schedule.actions[0], last), *schedule.actions[1:]))

    patch.setattr(numbers, "schedule_from_plan", longer)


def _one_message_less(patch: pytest.MonkeyPatch) -> None:
    right = numbers.ScheduleMessages.from_schedule

    def fewer(schedule: Any) -> Any:
        messages = right(schedule)
        channels = {channel: sent[1:] for channel, sent in messages.channels.items()}
        return replace(messages, channels=channels)

    patch.setattr(numbers.ScheduleMessages, "from_schedule", fewer)


def _one_sum_is_twice_sent(patch: pytest.MonkeyPatch) -> None:
    right = EventList.bytes_by_axis

    def more(self: EventList) -> dict[str, int]:
        sent = right(self)
        return sent | {"dp_shard": 2 * sent.get("dp_shard", 0)}

    patch.setattr(EventList, "bytes_by_axis", more)


LATE_W = (
    *("mesh.pp=2", "model.layers=4", "pipeline.schedule=file", "pipeline.file=FILE"),
    "batch.global_sequences=8",
)
MISTAKES: dict[str, tuple[tuple[str, ...], Plant, str]] = {
    "tiers of slices are swapped": (NODES, _swapped_slices, "sent over dp_shard to other nodes"),
    "tiers of sums are swapped": (HYBRID, _swapped_sums, "sent over dp_replicate to other nodes"),
    "rows of a step leave the node": (NODES, _all_pairs_far, "sent over world to other nodes"),
    "messages stay in the node": (ACROSS, _all_messages_near, "sent over pp to other nodes"),
    "keys stay in the node": (
        (TWO_NODES, "mesh.cp=4", "model.layers=1"),
        _keys_stay_near,
        "sent over cp to other nodes",
    ),
    "tokens stay in the node": (
        (TWO_NODES, "mesh.dp_shard=4", "mesh.ep=4", "model.layers=1", *EXPERTS),
        _tokens_stay_near,
        "sent over ep to other nodes",
    ),
    "a message too many": (PIPE, _message_too_many, "sent over pp"),
    "a sum is sent twice": (
        ("mesh.dp_shard=2", "zero.stage=1"),
        _one_sum_is_twice_sent,
        "dp_shard",
    ),
    "no master weights": (("precision.parameters=bf16",), _no_masters, "optimizer between steps"),
    "no gathered units": (
        ("mesh.dp_shard=2", "zero.stage=3", "zero.reshard_after_forward=never"),
        _no_whole_units,
        "gathered parameters at the peak",
    ),
    "no filling buckets": (
        ("mesh.dp_shard=2", "zero.stage=3", "precision.parameters=bf16"),
        _no_filling_buckets,
        "buffers at the peak",
    ),
    "no offload buffers": (
        ("mesh.dp_shard=2", "zero.stage=3", "zero.optimizer_offload=host"),
        _no_offload_buffers,
        "buffers at the peak",
    ),
    "no bound of whole units": (
        ("mesh.dp_shard=2", "zero.stage=3"),
        _no_bound_of("whole units of parameters"),
        "gathered parameters in a step, at most",
    ),
    "no bound of sums": (
        ("mesh.dp_shard=2", "zero.stage=2"),
        _no_bound_of("gradients being summed"),
        "buffers in a step, at most",
    ),
    "one microbatch more is held": (PIPE, _one_more_held, "activations held at once"),
    "activations are free before W": (LATE_W, _freed_at_b, "activations held at once"),
    "two actions are turned": (PIPE, _other_order, "was"),
    "a W more": (PIPE, _one_weight_gradient_more, "actions of the schedule, W0"),
    "a message less": (PIPE, _one_message_less, "messages of the schedule"),
}


def flags_of(settings: tuple[str, ...], file: Path) -> list[str]:
    """Return the flags of settings, FILE replaced."""
    return [word for setting in settings for word in ("--set", setting.replace("FILE", str(file)))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of `ROWS`."""
    path = tmp_path / "mine.csv"
    path.write_text("".join(f"{row}\n" for row in ROWS))
    return path


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_number_ends_the_rehearsal(
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: Path,
) -> None:
    settings, plant, name = MISTAKES[mistake]
    flags = flags_of(settings, file)
    plant(monkeypatch)
    assert main(["rehearse", "nano", *flags, "--workers", "1"]) == 1
    printed = capsys.readouterr()
    assert "error[rehearse-number]" in printed.err
    assert name in " ".join(printed.err.split())
    assert "DIFFERS" in printed.out


@pytest.mark.parametrize("settings", [NODES, HYBRID, ACROSS])
def test_every_number_of_a_right_plan_holds(settings: tuple[str, ...]) -> None:
    rehearsal = rehearse(plan_of(*settings), workers=1)
    assert rehearsal.holds
    assert all(number.holds for number in rehearsal.numbers)
    far = [number for number in rehearsal.numbers if number.name.endswith("to other nodes")]
    assert any(number.planned for number in far)


def test_counts_of_a_checked_file_are_those_of_the_executor(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", "check", str(file), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert main(["rehearse", "nano", *flags_of(LATE_W, file), "--workers", "1", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["rehearsal"]["ranks"]

    def counted(name: str) -> list[int]:
        return [
            number["rehearsed"]
            for rank in ranks
            for number in rank["numbers"]
            if (number["name"], number["part"]) == (name, "")
        ]

    assert sum(counted("actions of the schedule")) == checked["num_actions"] == 24
    assert sum(counted("messages of the schedule")) == checked["num_messages"] == 8
    assert counted("activations held at once") == checked["peak_in_flight_per_rank"] == [3, 3]


def test_a_number_says_what_differs() -> None:
    number = numbers.PlanNumber(
        rank=1, name="messages", part="F0", planned=4, rehearsed=5, error=1, note="there"
    )
    assert not number.holds
    assert number.text == "messages, F0: the plan has 4, the rehearsed rank 5; there"
    assert number.to_json()["holds"] is False
