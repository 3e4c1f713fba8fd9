"""Numbers of a plan beside those of its ranks; each wrong one ends `echelon rehearse`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.core.event import EventList
from echelon.cost.bytes import all_reduce, sent
from echelon.cost.peak import rank_peak
from echelon.cost.peak.buckets import GradientSums, WholeUnits
from echelon.rehearsal import numbers
from echelon.rehearsal.run import rehearse
from echelon.schedule.action import Action, ActionKind
from tests.rehearsal.test_run import plan_of

TWO_NODES = f"cluster.file={Path(__file__).parents[2] / 'examples' / 'two-nodes.toml'}"
NODES = (TWO_NODES, "mesh.dp_shard=4", "zero.stage=3")
HYBRID = (TWO_NODES, "mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=2")
PIPE = ("mesh.pp=2", "model.layers=4", "pipeline.schedule=zb-h1", "batch.global_sequences=8")
ACROSS = (*PIPE, TWO_NODES, "mesh.dp_replicate=2")

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


def _other_order(patch: pytest.MonkeyPatch) -> None:
    right = numbers.schedule_from_plan

    def turned(plan: Any) -> Any:
        found = right(plan)
        rows = tuple((*row[:-2], row[-1], row[-2]) for row in found.actions)
        return replace(found, actions=rows)

    patch.setattr(numbers, "schedule_from_plan", turned)


def _one_weight_gradient_more(patch: pytest.MonkeyPatch) -> None:
    right = numbers.schedule_from_plan

    def longer(plan: Any) -> Any:
        found = right(plan)
        more = Action(ActionKind.W, 0, 0)
        return replace(found, actions=((*found.actions[0], more), *found.actions[1:]))

    patch.setattr(numbers, "schedule_from_plan", longer)


def _one_message_less(patch: pytest.MonkeyPatch) -> None:
    right = numbers.ScheduleMessages.from_schedule

    def fewer(schedule: Any) -> Any:
        found = right(schedule)
        channels = {channel: sent[1:] for channel, sent in found.channels.items()}
        return replace(found, channels=channels)

    patch.setattr(numbers.ScheduleMessages, "from_schedule", fewer)


def _one_sum_is_twice_sent(patch: pytest.MonkeyPatch) -> None:
    right = EventList.bytes_by_axis

    def more(self: EventList) -> dict[str, int]:
        found = right(self)
        return found | {"dp_shard": 2 * found.get("dp_shard", 0)}

    patch.setattr(EventList, "bytes_by_axis", more)


MISTAKES: dict[str, tuple[tuple[str, ...], Plant, str]] = {
    "tiers of slices are swapped": (NODES, _swapped_slices, "sent over dp_shard to other nodes"),
    "tiers of sums are swapped": (HYBRID, _swapped_sums, "sent over dp_replicate to other nodes"),
    "rows of a step leave the node": (NODES, _all_pairs_far, "sent over world to other nodes"),
    "messages stay in the node": (ACROSS, _all_messages_near, "sent over pp to other nodes"),
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
    "two actions are turned": (PIPE, _other_order, "was"),
    "a W more": (PIPE, _one_weight_gradient_more, "actions of the schedule, W0"),
    "a message less": (PIPE, _one_message_less, "messages of the schedule"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_number_ends_the_rehearsal(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, plant, name = MISTAKES[mistake]
    flags = [word for one in settings for word in ("--set", one)]
    plant(monkeypatch)
    assert main(["rehearse", "nano", *flags, "--workers", "1"]) == 1
    told = capsys.readouterr()
    assert "error[rehearse-number]" in told.err
    assert name in " ".join(told.err.split())
    assert "DIFFERS" in told.out


@pytest.mark.parametrize("settings", [NODES, HYBRID, ACROSS])
def test_every_number_of_a_right_plan_holds(settings: tuple[str, ...]) -> None:
    found = rehearse(plan_of(*settings), workers=1)
    assert found.holds
    assert all(number.holds for number in found.numbers)
    far = [number for number in found.numbers if number.name.endswith("to other nodes")]
    assert any(number.planned for number in far)


def test_a_number_says_what_differs() -> None:
    number = numbers.PlanNumber(
        rank=1, name="messages", part="F0", planned=4, rehearsed=5, error=1, note="there"
    )
    assert not number.holds
    assert number.text == "messages, F0: the plan has 4, the rehearsed rank 5; there"
    assert number.to_json()["holds"] is False
