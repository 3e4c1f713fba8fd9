# SPDX-License-Identifier: Apache-2.0
"""DualPipe: microbatches enter the pipeline from both ends, on two copies of the stages.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, figure 5 and table 2.
Rank r holds stage r for the microbatches that enter at rank 0, and stage p-1-r for those that enter
at rank p-1 (the `mirrored` ones). Its aim is to hide the all-to-all of experts behind the other
stream's compute; it costs twice the parameters.

`meeting_streams` is the order of both streams, which DualPipeV has too: that of the authors'
code (github.com/deepseek-ai/DualPipe). Each rank works on a near stage (the stream that reaches it
first) and a far stage. The paper's overlapped pair F&B is here F and then BW, back to back: what F
made is sent when F ends, not when the pair does.

DualPipeV is DualPipe cut in half, so that one copy of the parameters is enough. Half of DualPipe's
ranks mirror the other half; Sea AI Lab cut them off and folded the pipeline into a V
("cut-in-half"), as the authors' code has it. The streams that meet are then the way down and the
way back of the same microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.builder import EQUAL_TIMES, ActionTimes, Builder, VShaped

Cell = tuple[int, int]
"""A stage and a microbatch."""


def meeting_streams(
    *, rank: int, num_ranks: int, near: tuple[Cell, ...], far: tuple[Cell, ...]
) -> tuple[Action, ...]:
    """Return the actions of `rank` of the `num_ranks` between an end and where the streams meet.

    `near` and `far` are the cells of the rank in both streams, equally many.
    """
    steps = _Steps(near, far)
    outer, inner = num_ranks - 1 - rank, rank + 1
    for _ in range(2 * outer):
        steps.forward(near=True)
    for _ in range(inner):
        steps.forward(near=True)
        steps.forward(near=False)
    for _ in range(outer):
        steps.backward(near=False, split=True)
        steps.weight()
        steps.forward(near=False)
    for _ in range(len(near) - 2 * num_ranks + inner):
        steps.forward(near=True)
        steps.backward(near=False)
        steps.forward(near=False)
        steps.backward(near=True)
    for _ in range(outer):
        steps.backward(near=False)
        steps.forward(near=False)
        steps.backward(near=True)
    # The last `inner` of these 2 x inner backward passes leave their W for the end.
    for number in range(2 * inner):
        steps.backward(near=number % 2 == 1, split=number >= inner)
    for _ in range(outer):
        steps.weight()
        steps.backward(near=True, split=True)
    for _ in range(inner):
        steps.weight()
    return tuple(steps.actions)


def meeting_idle_s(times: ActionTimes, num_ranks: int) -> float:
    """Return how long each rank waits in a step, `num_ranks` being between an end and the meeting.

    (num_ranks - 1)(F+B-W) if W <= B <= F <= B + W, so also where all are equal; other times
    make other chains the longest, and no paper states them.
    """
    hops = num_ranks - 1
    if hops == 0:
        return 0
    f, b, w = times.forward_s, times.input_gradient_s, times.weight_gradient_s
    return max(
        hops * (f + b - w),
        hops * f,
        hops * b - f,
        2 * hops * (f - w),
        hops * (2 * b - w) - f,
        hops * (2 * f - b - w),
    )


class _Steps:
    """Collect actions, with a queue of the weight gradients that are left, first in first out."""

    def __init__(self, near: tuple[Cell, ...], far: tuple[Cell, ...]) -> None:
        self.actions: list[Action] = []
        self._forwards: tuple[Iterator[Cell], Iterator[Cell]] = iter(far), iter(near)
        self._backwards: tuple[Iterator[Cell], Iterator[Cell]] = iter(far), iter(near)
        self._left: deque[Cell] = deque()

    def forward(self, *, near: bool) -> None:
        stage, microbatch = next(self._forwards[near])
        self.actions.append(Action(ActionKind.F, stage, microbatch))

    def backward(self, *, near: bool, split: bool = False) -> None:
        stage, microbatch = next(self._backwards[near])
        self.actions.append(Action(ActionKind.B if split else ActionKind.BW, stage, microbatch))
        if split:
            self._left.append((stage, microbatch))

    def weight(self) -> None:
        stage, microbatch = self._left.popleft()
        self.actions.append(Action(ActionKind.W, stage, microbatch))


class DualPipe(Builder):
    """Build DualPipe: microbatches 0 to m/2-1 enter at rank 0, m/2 to m-1 are mirrored."""

    name = "dualpipe"
    paper = "DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1"
    places = "one stage, and a copy of its mirror image, on each pipeline rank"
    microbatches_per_rank = 2  # as the authors demand: p for each direction
    microbatch_multiple = 2
    suits = "the parameters fit twice; sums over mirrored ranks come on top"
    closed_forms = "echelon.cost.inputs.pipeline:DUALPIPE"
    stage_copies = 2
    is_searched = False

    @classmethod
    def fits_ranks(cls, num_ranks: int) -> bool:
        """Return whether p is even: no rank may be its own mirror image."""
        return num_ranks >= 2 and num_ranks % 2 == 0

    def mirrored(self) -> tuple[int, ...]:
        """Return the second half of the microbatches."""
        return tuple(range(self.num_microbatches // 2, self.num_microbatches))

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return both streams, the one that enters at the nearer end first."""
        half = self.num_microbatches // 2
        mirror = self.num_ranks - 1 - rank
        straight = tuple((rank, microbatch) for microbatch in range(half))
        mirrored = tuple((mirror, microbatch) for microbatch in self.mirrored())
        near, far = (straight, mirrored) if rank < mirror else (mirrored, straight)
        return meeting_streams(
            rank=min(rank, mirror), num_ranks=self.num_ranks // 2, near=near, far=far
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p/2-1)(F+B-W) if W <= B <= F <= B + W, or the longest of other chains.

        Less than the paper's, by (p/2-1) B: see `paper_bubble_s`.
        """
        return meeting_idle_s(times, self.num_ranks // 2)

    def paper_bubble_s(
        self, times: ActionTimes = EQUAL_TIMES, overlapped_pair_s: float | None = None
    ) -> float:
        """Return (p/2-1)(F&B+B-3W), B being the whole backward pass (table 2).

        It is exact if F&B lasts F + B and gives both results only at its end.
        """
        both = times.total_s if overlapped_pair_s is None else overlapped_pair_s
        return (self.num_ranks // 2 - 1) * (both + times.backward_s - 3 * times.weight_gradient_s)

    def peak_in_flight(self, stage: int) -> int:
        """Return p - stage, on each of the two ranks that hold the stage."""
        return self.num_ranks - stage

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return p + 1."""
        del rank
        return self.num_ranks + 1


class DualPipeV(VShaped):
    """Build DualPipeV."""

    name = "dualpipe-v"
    paper = "DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, cut in half"
    suits = "as dualpipe, with one copy of the parameters"
    closed_forms = "echelon.cost.inputs.pipeline:DUALPIPE_V"
    microbatches_per_rank = 2  # as the authors demand: the number of stages
    ends_on_first_rank = True
    tool_names = MappingProxyType({"torchtitan": "DualPipeV"})

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return the stage on the way down as the near stream, the one on the way back as far."""
        microbatches = range(self.num_microbatches)
        return meeting_streams(
            rank=rank,
            num_ranks=self.num_ranks,
            near=tuple((rank, microbatch) for microbatch in microbatches),
            far=tuple((self.num_stages - 1 - rank, microbatch) for microbatch in microbatches),
        )

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-W) if W <= B <= F <= B + W, or the longest of other chains.

        F, B and W are those of one of the 2p stages.
        """
        return meeting_idle_s(times, self.num_ranks)

    def paper_bubble_s(
        self, times: ActionTimes = EQUAL_TIMES, overlapped_pair_s: float | None = None
    ) -> float:
        """Return (p-1)(F&B+B-3W), B being the whole backward pass; the paper's PP is 2p here.

        It is exact if F&B lasts F + B and gives both results only at its end.
        """
        both = times.total_s if overlapped_pair_s is None else overlapped_pair_s
        return (self.num_ranks - 1) * (both + times.backward_s - 3 * times.weight_gradient_s)

    def peak_in_flight(self, stage: int) -> int:
        """Return 2p - stage."""
        return self.num_stages - stage

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return 2p + 1 half-stages."""
        del rank
        return self.num_stages + 1
