"""What DualPipe and DualPipeV share: two streams of microbatches that meet on every rank.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, figure 5; the order
of steps is that of the authors' code (github.com/deepseek-ai/DualPipe). Each rank works on a near
stage (the stream that reaches it first) and a far stage. The paper's overlapped pair F&B is here F
and then BW, back to back: what F made is sent when F ends, not when the pair does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import ActionTimes

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


def paper_bubble_s(
    times: ActionTimes, num_ranks: int, overlapped_pair_s: float | None = None
) -> float:
    """Return (PP/2 - 1)(F&B + B - 3W), with B the whole backward pass and PP / 2 = `num_ranks`.

    F&B is `overlapped_pair_s`, or F + B where nothing is gained by overlapping.
    """
    both = times.total_s if overlapped_pair_s is None else overlapped_pair_s
    return (num_ranks - 1) * (both + times.backward_s - 3 * times.weight_gradient_s)


class _Steps:
    """Collect actions, with a queue of the weight gradients that are left, first in first out."""

    def __init__(self, near: tuple[Cell, ...], far: tuple[Cell, ...]) -> None:
        self.actions: list[Action] = []
        self._forwards: tuple[Iterator[Cell], Iterator[Cell]] = iter(far), iter(near)
        self._backwards: tuple[Iterator[Cell], Iterator[Cell]] = iter(far), iter(near)
        self._left: deque[Cell] = deque()

    def forward(self, *, near: bool) -> None:
        self.actions.append(Action(ActionKind.F, *next(self._forwards[near])))

    def backward(self, *, near: bool, split: bool = False) -> None:
        cell = next(self._backwards[near])
        self.actions.append(Action(ActionKind.B if split else ActionKind.BW, *cell))
        if split:
            self._left.append(cell)

    def weight(self) -> None:
        self.actions.append(Action(ActionKind.W, *self._left.popleft()))
