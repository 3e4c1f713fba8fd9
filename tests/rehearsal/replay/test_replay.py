"""Microbatches that are replayed: the rank has the log, memory and work of one that walks all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.parallel.pipeline import PipelineExecutor
from echelon.rehearsal.order import Entry, Issue, Wait
from echelon.rehearsal.rank import RankRehearsal, rehearse_rank
from echelon.rehearsal.replay import (
    ENDED,
    MADE,
    WALKED_FIRST,
    MemoryChange,
    Microbatch,
    NotAlike,
    groups_of_microbatches,
    without_detours,
)
from echelon.rehearsal.run import on_nccl
from echelon.schedule.action import Action

PIPE = ("mesh.pp=2", "model.layers=4", "batch.global_sequences=16", "batch.microbatch_sequences=2")
FOUR = ("mesh.pp=2", "model.layers=8", "batch.global_sequences=16", "batch.microbatch_sequences=2")
EXPERTS = (
    *("mesh.dp_shard=2", "mesh.ep=2", "batch.global_sequences=32"),
    *("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=96"),
    "precision.parameters=bf16",
)

PLANS: dict[str, tuple[str, ...]] = {
    "1f1b": PIPE,
    "zero bubble, tp": (*PIPE, "pipeline.schedule=zb-h1", "mesh.tp=2"),
    "zb-v": (*PIPE, "pipeline.schedule=zb-v"),
    "dualpipe-v": (*PIPE, "pipeline.schedule=dualpipe-v"),
    "interleaved": (*FOUR, "pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2"),
    "tied": (*PIPE, "model.tied=true"),
    "zero 1, recompute": (
        *(*PIPE[:2], "batch.global_sequences=32", "mesh.dp_shard=2", "zero.stage=1"),
        "recompute.policy=full",
    ),
    "ring": (*PIPE, "mesh.cp=2", "context.kind=ring"),
    "experts": (*PIPE[:2], *EXPERTS),
    "experts, recompute": (*PIPE[:2], *EXPERTS, "recompute.policy=full"),
}
"""Plans of eight microbatches, of which a rank walks four on each of its stages."""


def plan_of(*flags: str) -> Plan:
    return on_nccl(load_job("nano", flags).plan)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """Return the forward passes that the engine computes."""
    walked: list[Action] = []
    forward: Callable[..., torch.Tensor | None] = PipelineExecutor._forward

    def noted(self: PipelineExecutor, state: Any, action: Action, *args: Any) -> Any:
        walked.append(action)
        return forward(self, state, action, *args)

    monkeypatch.setattr(PipelineExecutor, "_forward", noted)
    return walked


def walked_whole(plan: Plan, rank: int, monkeypatch: pytest.MonkeyPatch) -> RankRehearsal:
    """The rehearsal of a rank whose microbatches are all walked."""
    with monkeypatch.context() as patch:
        patch.setattr("echelon.rehearsal.replay.MicrobatchReplay._is_replayed", lambda *_: False)
        return rehearse_rank(plan, rank)


def without_times(events: tuple[Event, ...]) -> list[Event]:
    return [replace(event, start=0.0, end=0.0, waited_s=0.0) for event in events]


@pytest.mark.quick("1f1b", "zb-v", "experts, recompute")
@pytest.mark.parametrize("name", PLANS)
def test_a_replayed_rank_is_one_that_walks_all_of_its_microbatches(
    name: str, forwards: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(*PLANS[name])
    assert plan.num_microbatches == 8
    last = plan.mesh.world_size - 1
    for rank in (0, last):
        forwards.clear()
        replayed = rehearse_rank(plan, rank)
        stages = {action.stage for action in forwards}
        groups = len(forwards) / (2 * len(stages))
        assert groups == WALKED_FIRST + 1 or name == "dualpipe-v"
        walked = walked_whole(plan, rank, monkeypatch)
        assert replace(replayed, events=()) == replace(walked, events=())
        assert without_times(replayed.events) == without_times(walked.events)


@pytest.mark.parametrize("stage", [2, 3])
def test_all_are_walked_where_each_is_gathered_or_summed(
    stage: int, forwards: list[Action]
) -> None:
    plan = plan_of("mesh.dp_shard=2", f"zero.stage={stage}", "batch.global_sequences=32")
    rehearse_rank(plan, 0)
    assert len(forwards) == 2 * plan.num_microbatches


def test_all_are_walked_where_one_of_the_first_differs(
    forwards: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(*PIPE)
    forward: Callable[..., torch.Tensor | None] = PipelineExecutor._forward

    def uneven(self: PipelineExecutor, state: Any, action: Action, *args: Any) -> Any:
        if action.microbatch == 2:
            torch.empty(1, device="meta").add_(1)
        return forward(self, state, action, *args)

    monkeypatch.setattr(PipelineExecutor, "_forward", uneven)
    replayed = rehearse_rank(plan, 0)
    assert {action.microbatch for action in forwards} == set(range(8))
    assert replace(replayed, events=()) == replace(walked_whole(plan, 0, monkeypatch), events=())


def test_microbatches_with_other_actions_are_another_group() -> None:
    actions = [Action.parse(text) for text in ("F0.0", "F0.1", "B0.0", "BW0.1", "W0.0", "F1.0")]
    assert groups_of_microbatches(actions) == {
        (0, 0): (0, " F B W"),
        (0, 1): (0, " F BW"),
        (1, 0): (1, " F"),
    }


def issue(name: str) -> Issue:
    return Issue(
        communicator="tp.1",
        members=(0, 1),
        kind="all_reduce",
        num_bytes=4,
        dtype="float32",
        name=name,
        task="F0.1",
    )


def test_entries_are_written_again_with_places_and_task_of_their_own() -> None:
    log: list[Entry] = [issue("before"), Wait(issue=0), issue("sum"), Wait(issue=2)]
    walked, replayed = Microbatch(), Microbatch()
    entries = walked.canonical_entries(log, 2, "F0.1")
    assert walked.is_closed
    replayed.write_again(log, entries, "F0.5")
    assert log[4:] == [replace(issue("sum"), task="F0.5"), Wait(issue=4)]
    with pytest.raises(NotAlike, match="another microbatch"):
        Microbatch().canonical_entries(log, 5, "F0.5")
    left = Microbatch()
    left.canonical_entries(log[:3], 2, "F0.1")
    assert not left.is_closed


def test_memory_of_a_microbatch_has_numbers_and_that_of_others_is_not_its_own() -> None:
    microbatch = Microbatch()
    changes = [
        MemoryChange("activations", 8, MADE, 700),
        MemoryChange("activations", 4, MADE, 800),
        MemoryChange("activations", -8, ENDED, 700),
    ]
    assert [change.storage for change in microbatch.canonical(changes, {800: "output"})] == [
        0,
        "output",
        0,
    ]
    assert microbatch.is_closed
    with pytest.raises(NotAlike, match="made by others"):
        Microbatch().canonical(changes[2:], {})
    with pytest.raises(NotAlike, match="no memory in its pass"):
        Microbatch().canonical(changes, {900: "output"})
    open_one = Microbatch()
    open_one.canonical(changes[:2], {})
    assert not open_one.is_closed


def test_a_way_of_memory_keeps_its_highest_point_and_its_end() -> None:
    plus, minus = MemoryChange("activations", 8, MADE, 1), MemoryChange("activations", -8, ENDED, 1)
    output = MemoryChange("activations", 4, MADE, "output")
    other = MemoryChange("buffers", 2, MADE, 2)
    assert without_detours([minus, plus, plus, minus, output, minus, plus, other]) == [
        MemoryChange("activations", 8),
        MemoryChange("activations", -8),
        output,
        MemoryChange("buffers", 2),
    ]
