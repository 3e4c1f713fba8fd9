"""Pipeline parallelism: the executor of any checked schedule.

Split: the blocks; stage 0 also embeds, the last stage also gives the loss.
Sent:  one activation [N, D] from stage to stage forward and its gradient back, per microbatch.
Bytes: `cost.bytes_sent.pipeline_bytes`.
Must divide: nothing; stages may be uneven. 1F1B needs as many microbatches as stages.
Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream-2BW", 2021 (1F1B).

One loop over the action list that the checker proved and the simulator timed. Sends are posted as
soon as the data exists, receives ahead of need; shapes are known, so nothing is negotiated.
Shape suffixes: N tokens of a microbatch on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.collectives import Group, Pending
from echelon.parallel.gradients import GradientStore
from echelon.parallel.recorder import Recorder
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.messages import Channel, Message, Step, Traffic

_RECEIVES_AHEAD = 2
"""Actions whose receives are posted before their turn, so that a transfer overlaps compute."""

_SENDS_SPARE = 2
"""Sends per link that may be pending beyond those that the schedule needs, to keep it busy."""

Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeLinks:
    """Give the groups that carry messages: one for each direction between ranks."""

    forward: Group
    backward: Group

    def carrier(self, message: Message) -> Group:
        """Return the group that carries a message."""
        return self.forward if message.source_rank < message.target_rank else self.backward


@dataclass(slots=True)
class _InFlight:
    """What a step keeps between actions."""

    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    handed_over: dict[tuple[ActionKind, int, int], torch.Tensor] = field(default_factory=dict)
    arriving: dict[Message, tuple[torch.Tensor, Pending]] = field(default_factory=dict)
    leaving: dict[Channel, list[tuple[torch.Tensor, Pending]]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class PipelineExecutor:
    """Run the stages of one pipeline rank."""

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        *,
        pp_rank: int,
        links: PipeLinks,
        store: GradientStore,
        recorder: Recorder,
        rows_divisor: int,
    ) -> None:
        """Own `stages`; an activation has N / `rows_divisor` rows (tp, if the stream is split)."""
        self.stages, self.pp_rank, self.links = stages, pp_rank, links
        self.store, self.recorder, self._divisor = store, recorder, rows_divisor
        self._window = 0
        self._traffic: dict[Schedule, tuple[Traffic, int]] = {}

    def run(
        self, schedule: Schedule, batches: Sequence[TokenBatch], scale: float
    ) -> dict[int, torch.Tensor]:
        """Run every action of this rank; return scale x the loss sum of each microbatch.

        The dict is empty on a rank that does not own the last stage. A schedule of forward
        actions only is an evaluation.
        """
        if schedule not in self._traffic:
            found = Traffic.of(schedule)
            self._traffic[schedule] = (found, send_window(found) + _SENDS_SPARE)
        traffic, self._window = self._traffic[schedule]
        steps, posts = traffic.steps[self.pp_rank], traffic.receives[self.pp_rank]
        last_backward = self._last_backward(steps)
        state = _InFlight()
        posted = 0
        for position, step in enumerate(steps):
            while posted < len(steps) and posted <= position + _RECEIVES_AHEAD:
                for message in posts[posted]:
                    self._post_receive(state, message, batches[message.microbatch])
                posted += 1
            self._run_step(state, step, batches, scale, last=position == last_backward)
        for sent in state.leaving.values():
            for _, pending in sent:
                pending.wait()
        return state.losses

    def _run_step(
        self,
        state: _InFlight,
        step: Step,
        batches: Sequence[TokenBatch],
        scale: float,
        *,
        last: bool,
    ) -> None:
        action = step.action
        incoming = self._take(state, step)
        with self.recorder.action(action.kind.value, action.stage, action.microbatch):
            if action.kind is ActionKind.F:
                batch = batches[action.microbatch]
                outgoing = self._forward(state, action, incoming, batch, scale)
            elif action.kind is ActionKind.BW:
                self.store.start_backward(last=last)
                outgoing = self._backward(state, action, incoming)
                self.store.run_deferred()
            else:
                raise ValueError(f"{action}: split backward passes are not executed yet")
        self._give(state, step, outgoing)

    def _forward(
        self,
        state: _InFlight,
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
        if training:
            state.outputs[key] = out
        if stage.last:
            state.losses[action.microbatch] = out.detach()
            return None
        return out.detach()

    def _backward(
        self, state: _InFlight, action: Action, dy_ND: torch.Tensor | None
    ) -> torch.Tensor | None:
        key = (action.stage, action.microbatch)
        torch.autograd.backward(state.outputs.pop(key), dy_ND)
        x_ND = state.inputs.pop(key, None)
        return None if x_ND is None else x_ND.grad

    def _take(self, state: _InFlight, step: Step) -> torch.Tensor | None:
        if step.receive is not None:
            tensor, pending = state.arriving.pop(step.receive)
            pending.wait()
            return tensor
        if step.local_input:
            action = step.action
            return state.handed_over.pop((action.kind, action.stage, action.microbatch))
        return None

    def _give(self, state: _InFlight, step: Step, tensor: torch.Tensor | None) -> None:
        action = step.action
        if tensor is None:
            return
        if step.send is not None:
            tensor = tensor.contiguous()
            message = step.send
            pending = self.links.carrier(message).send(
                tensor, message.target_rank, name=str(message), tag=message.microbatch
            )
            sent = state.leaving.setdefault(message.channel, [])
            sent.append((tensor, pending))
            # What the other side has need not be kept. The checker's window says how many sends
            # must be allowed to be pending for the schedule to end; older ones are waited for.
            while len(sent) > self._window:
                sent.pop(0)[1].wait()
        elif step.local_output:
            ahead = 1 if action.kind is ActionKind.F else -1
            state.handed_over[(action.kind, action.stage + ahead, action.microbatch)] = tensor

    def _post_receive(self, state: _InFlight, message: Message, batch: TokenBatch) -> None:
        stage = next(iter(self.stages.values()))
        like = next(stage.parameters())
        rows = batch.tokens_N.numel() // self._divisor
        buffer = like.new_empty((rows, stage.shape.hidden), requires_grad=False)
        pending = self.links.carrier(message).receive(
            buffer, message.source_rank, name=str(message), tag=message.microbatch
        )
        state.arriving[message] = (buffer, pending)

    @staticmethod
    def _last_backward(steps: Sequence[Step]) -> int:
        positions = [i for i, step in enumerate(steps) if step.action.kind is ActionKind.BW]
        return positions[-1] if positions else -1
