# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: the executor of any checked schedule.

Split: the blocks; stage 0 also embeds, the last stage also gives the loss.
Sent:  one activation [N, D] from stage to stage forward and its gradient back, per microbatch.
Bytes: `pipeline_bytes` in `cost/bytes/sent.py`.
Must divide: what the schedule asks of stages and microbatches; stages may be uneven, or empty.
Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream-2BW", 2021 (1F1B), and 2021
        (virtual stages); Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (B and W).

One loop over the action list that the checker proved and the simulator timed. A send is posted as
soon as its data exists, a receive ahead of need; shapes are known, so nothing is negotiated, and
each microbatch may have a length of its own. What an action leaves is kept until the one that uses
it, by the list: the input of a stage and the graph of its forward pass from F to B (of its output
only the edge in the graph), the weight gradients that B leaves until W. What a list uses before it
is made, or twice, is an error. In training a loss is a number once its backward has run
(`parallel/vocabulary.py`). Shape suffixes: N tokens of a microbatch on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.gradients import DeferredWeightGradient, GradientStore
from echelon.parallel.transport.collectives import Group, Pending
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.messages import (
    RECEIVES_AHEAD,
    SENDS_SPARE,
    ActionWithMessages,
    Channel,
    Message,
    ScheduleMessages,
    run_action_lists,
)

ActionKey = tuple[int, int]
"""A stage and a microbatch."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShape:
    """Say what a message is: N / `divisor` rows (tp, where the stream is split) of `hidden`."""

    hidden: int
    divisor: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_plan(cls, plan: Plan, like: torch.Tensor, *, scattered: bool) -> StreamShape:
        """Return the stream of a plan, as `like`; `scattered` over its tensor ranks or whole."""
        divisor = plan.mesh.tp if scattered else 1
        hidden = plan.model.hidden
        return cls(hidden=hidden, divisor=divisor, dtype=like.dtype, device=like.device)

    def buffer(self, batch: TokenBatch) -> torch.Tensor:
        """Return memory for the activation of a microbatch, or for its gradient."""
        rows = batch.tokens_N.numel() // self.divisor
        return torch.empty((rows, self.hidden), dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class StepState:
    """What a step keeps between actions."""

    inputs: dict[ActionKey, torch.Tensor] = field(default_factory=dict)
    outputs: dict[ActionKey, GradientEdge | torch.Tensor] = field(default_factory=dict)
    weights: dict[ActionKey, list[DeferredWeightGradient]] = field(default_factory=dict)
    handed_over: dict[tuple[ActionKind, int, int], torch.Tensor] = field(default_factory=dict)
    arriving: dict[Message, tuple[torch.Tensor, Pending]] = field(default_factory=dict)
    leaving: dict[Channel, list[tuple[torch.Tensor, Pending]]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def left_over(self) -> list[str]:
        """Return what was made and never used."""
        return [
            *(f"the input of F{stage}.{one}" for stage, one in self.inputs),
            *(f"the graph of F{stage}.{one}" for stage, one in self.outputs),
            *(f"the weight gradients of B{stage}.{one}" for stage, one in self.weights),
            *(f"what {kind.value}{stage}.{one} takes" for kind, stage, one in self.handed_over),
            *map(str, self.arriving),
        ]


class StageModel(Protocol):
    """What computes a stage, as a `Decoder` does."""

    first: bool
    last: bool

    def __call__(
        self, x_ND: torch.Tensor | None, batch: TokenBatch, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return x_ND for the next stage or, on the last one, scale x the sum of token losses."""
        ...


class ActionObserver(Protocol):
    """Whoever looks at what a step keeps: told when an action has its input, and when it ended."""

    def action_began(self, action: Action, state: StepState) -> None:
        """Learn that an action begins to compute."""
        ...

    def action_ended(self, action: Action, state: StepState) -> None:
        """Learn that an action has left what it leaves."""
        ...


class PipelineExecutor:
    """Run the stages of one pipeline rank."""

    def __init__(
        self,
        stages: Mapping[int, StageModel],
        *,
        pp_rank: int,
        groups: RankGroups,
        store: GradientStore,
        stream: StreamShape,
    ) -> None:
        self.stages, self.pp_rank, self.groups = stages, pp_rank, groups
        self.store, self.recorder, self.stream = store, groups.recorder, stream
        self.observer: ActionObserver | None = None
        self._rows: dict[int, RankSchedule] = {}

    def run(
        self, schedule: Schedule, batches: Sequence[TokenBatch], scale: float
    ) -> dict[int, torch.Tensor]:
        """Run every action of this rank; return scale x the loss sum of each microbatch.

        It has those of the microbatches whose last stage is here. A schedule of forward actions
        only is an evaluation.
        """
        # By identity: to hash thousands of actions takes longer than to run a small step.
        if id(schedule) not in self._rows:
            self._rows[id(schedule)] = RankSchedule.from_schedule(schedule, self.pp_rank)
        row = self._rows[id(schedule)]
        state = StepState()
        posted = 0
        for position, step in enumerate(row.steps):
            while posted < len(row.steps) and posted <= position + RECEIVES_AHEAD:
                for message in row.receives[posted]:
                    self._post_receive(state, message, batches[message.microbatch])
                posted += 1
            last = row.last.get(step.action.stage) == position
            try:
                self._run_step(state, step, row.turns[position], batches, scale, last=last)
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise  # of a kind that has a meaning of its own, such as out of memory
                raise RuntimeError(f"{step.action}: {error}") from error
            if self.observer is not None:
                self.observer.action_ended(step.action, state)
            self._settle_sends(state, row.window)
        self.recorder.at("", None)
        for sent in state.leaving.values():
            for _, pending in sent:
                pending.wait()
        if unused := state.left_over():
            raise RuntimeError(f"the schedule {schedule.name} left unused: {', '.join(unused[:3])}")
        return state.losses

    def _run_step(
        self,
        state: StepState,
        step: ActionWithMessages,
        turn: int,
        batches: Sequence[TokenBatch],
        scale: float,
        *,
        last: bool,
    ) -> None:
        action = step.action
        stage, key = action.stage, (action.stage, action.microbatch)
        self.recorder.at(str(action), turn)
        incoming = self._take(state, step)
        self.recorder.at(str(action), turn + 1)
        if self.observer is not None:
            self.observer.action_began(action, state)
        with self.recorder.action(action.kind.value, stage, action.microbatch):
            if action.kind is ActionKind.F:
                batch = batches[action.microbatch]
                self._give(state, step, self._forward(state, action, incoming, batch, scale))
            elif action.kind is ActionKind.B:
                with self.store.collects() as work:
                    outgoing = self._backward(state, action, incoming)
                state.weights[key] = work
                self._give(state, step, outgoing)
            else:
                self.store.start_backward(stage, last=last)
                if action.kind is ActionKind.BW:
                    self._give(state, step, self._backward(state, action, incoming))
                    self.store.run_deferred()
                else:
                    self.store.run_collected(_take_used(state.weights, key))

    def _forward(
        self,
        state: StepState,
        action: Action,
        x_ND: torch.Tensor | None,
        batch: TokenBatch,
        scale: float,
    ) -> torch.Tensor | None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        training = torch.is_grad_enabled()
        if x_ND is not None and training:
            x_ND = state.inputs[key] = x_ND.detach().requires_grad_()
        out = stage(x_ND, batch, scale=scale)
        if stage.last:
            state.losses[action.microbatch] = out.detach()
            if training:
                state.outputs[key] = out
            return None
        if training:
            # The edge in the graph is all that backward needs: the output itself may go when it
            # has been sent. (That of an empty stage is its input.)
            state.outputs[key] = get_gradient_edge(out)
        return out.detach()

    def _backward(
        self, state: StepState, action: Action, dy_ND: torch.Tensor | None
    ) -> torch.Tensor | None:
        key = (action.stage, action.microbatch)
        out = _take_used(state.outputs, key)
        if self.stages[action.stage].first:
            torch.autograd.backward(out, dy_ND)
            return None
        x_ND = _take_used(state.inputs, key)
        if not x_ND.untyped_storage().nbytes():
            raise RuntimeError("the memory of its input was given back too early")
        torch.autograd.backward(out, dy_ND)
        if x_ND.grad is None:
            raise RuntimeError("it gave no gradient of its input")
        return x_ND.grad

    def _take(self, state: StepState, step: ActionWithMessages) -> torch.Tensor | None:
        if step.receive is not None:
            tensor, pending = _take_used(state.arriving, step.receive)
            pending.wait()
            return tensor
        if step.local_input:
            action = step.action
            kind = ActionKind.F if action.kind is ActionKind.F else ActionKind.B
            return _take_used(state.handed_over, (kind, action.stage, action.microbatch))
        return None

    def _give(
        self, state: StepState, step: ActionWithMessages, tensor: torch.Tensor | None
    ) -> None:
        action = step.action
        if tensor is None:
            return
        if step.send is not None:
            tensor = tensor.contiguous()
            message = step.send
            pending = self._group_for(message).send(
                tensor, message.target_rank, name=str(message), tag=message.microbatch
            )
            state.leaving.setdefault(message.channel, []).append((tensor, pending))
        elif step.local_output:
            forward = action.kind is ActionKind.F
            kind, ahead = (ActionKind.F, 1) if forward else (ActionKind.B, -1)
            state.handed_over[(kind, action.stage + ahead, action.microbatch)] = tensor

    def _settle_sends(self, state: StepState, window: int) -> None:
        """Let go of all but the last `window` sends of each channel.

        What the other side has need not be kept. The checker's window says how many sends must be
        allowed to be pending for the schedule to end; older ones are waited for.
        """
        for sent in state.leaving.values():
            while len(sent) > window:
                sent.pop(0)[1].wait()

    def _group_for(self, message: Message) -> Group:
        """Return the group that carries a message: one for each direction between ranks."""
        forward = message.source_rank < message.target_rank
        return self.groups.pipe_forward if forward else self.groups.pipe_backward

    def _post_receive(self, state: StepState, message: Message, batch: TokenBatch) -> None:
        buffer = self.stream.buffer(batch)
        group = self._group_for(message)
        source = message.source_rank
        name = f"{message} from rank {group.ranks[source]}"
        pending = group.receive(buffer, source, name=name, tag=message.microbatch)
        state.arriving[message] = (buffer, pending)


def _take_used(kept: dict[K, T], key: K) -> T:
    """Return what an earlier action left for this one, and let go of it."""
    if key not in kept:
        raise RuntimeError(
            "what it needs is not there: it was never made, or it was freed too early"
        )
    return kept.pop(key)


@lru_cache(maxsize=2)
def _of_all_ranks(schedule: Schedule) -> tuple[ScheduleMessages, Mapping[Action, int], int]:
    """Return the messages of a schedule, an order in which it can run, and its send window.

    They are the same for all ranks, of which a process may be several, one after the other.
    """
    traffic = ScheduleMessages.from_schedule(schedule)
    turns = {action: turn for turn, action in enumerate(run_action_lists(schedule)[0])}
    return traffic, turns, send_window(traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """What one rank runs of a schedule: its actions, the receives before each, how sends wait.

    `last` is the place of the last action of each stage that gives weight gradients. `turns` are
    the places of the actions in an order in which all ranks' actions can run, one after the other.
    """

    schedule: Schedule
    steps: Sequence[ActionWithMessages]
    receives: Sequence[Sequence[Message]]
    last: Mapping[int, int]
    window: int
    turns: Sequence[int]

    @classmethod
    def from_schedule(cls, schedule: Schedule, pp_rank: int) -> RankSchedule:
        """Return the row of pipeline rank `pp_rank`."""
        traffic, turn_of, window = _of_all_ranks(schedule)
        steps = traffic.steps[pp_rank]
        return cls(
            schedule=schedule,
            steps=steps,
            receives=traffic.receives[pp_rank],
            last={
                step.action.stage: place
                for place, step in enumerate(steps)
                if step.action.kind in (ActionKind.BW, ActionKind.W)
            },
            window=window + SENDS_SPARE,
            # Apart by two: a rank that waits for its input comes before one that has begun.
            turns=[2 * turn_of.get(step.action, len(turn_of)) for step in steps],
        )
