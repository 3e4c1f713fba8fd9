# SPDX-License-Identifier: Apache-2.0
"""A time that no schedule beats: how far a found one can be from the best.

It holds for every order of actions, fused or split, in the model of `simulate.py`. It is the
greatest of four kinds of bound.

**A microbatch** crosses all stages forward and backward, one after another.

**A link** carries its messages one at a time. Before the first of them lies a forward path (and a
backward path, for a gradient), behind the last of them what its microbatch still has to do.

**Memory**: from the start of F to the end of BW or W a cell holds one of a rank's M places, and in
between lies at least the way to the last stage and back. So the time that all cells are held is at
most M times the step, less what the places are empty while the rank's first M forward passes start
one after another and its last M cells are freed one after another.

**A rank** has its work, and two windows in which it can only do part of it:

- *Head*: up to a time x it does at most H of its work. Before its first forward pass can start,
  nothing: x = e, H = 0. Before the first backward pass can reach it, only forward passes, whose
  cells are all still held: x = d, H = M forward passes, or d - e if that is less.
- *Tail*: after some event, at least y passes to the end of the step, and the rank has at most T
  of its work left. After its last backward pass: y is the way of that microbatch to stage 0, T is
  the W of M held cells. After its last forward pass: y is the way of that microbatch to the last
  stage and back to stage 0, T is the backward work of M held cells.

With the least total work A (per cell the cheaper of BW and B + W) the event comes no earlier than
x + A - H - T', where T' <= T is the work left then, and the step ends max(y, T') later. So the step
takes at least x + A - H + max(y - T, 0), provided that the event lies behind x. It does for
x = e; for x = d it may not be so if all forward passes of the rank fit before d, and then the
second tail is left out. Where splitting costs time (B + W > BW), each second of W that fills the
first tail costs its share of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from echelon.schedule.simulate import Durations


def lower_bound(
    stage_ranks: Sequence[int],
    num_microbatches: int,
    durations: Durations,
    most_in_flight: Sequence[int],
) -> float:
    """Return seconds that no schedule of these stages is faster than; see the head of this file.

    `most_in_flight[r]` is the most pairs of stage and microbatch that rank `r` may hold.
    """
    paths = _Paths(stage_ranks, durations)
    bounds = [paths.turn + paths.back[-1] + paths.close]
    bounds += _links(stage_ranks, num_microbatches, durations, paths)
    for rank, limit in enumerate(most_in_flight):
        stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        places = min(limit, num_microbatches * len(stages))
        bounds.append(_memory(stages, num_microbatches, places, durations, paths))
        bounds.append(_work(stages, num_microbatches, places, durations, paths))
    return max(bounds)


class _Paths:
    """Hold the least times along the chain of a microbatch.

    `there[s]`: from the start of the step to the start of F on stage s. `turn`: to the start of the
    last stage's backward pass. `back[s]`: from the start of the backward pass on stage s to the end
    of the one on stage 0. `close`: what then remains, if that one was split. `work[s]`: the least
    seconds of a whole backward pass on stage s.
    """

    def __init__(self, stage_ranks: Sequence[int], durations: Durations) -> None:
        whole, half = durations.backward_s, durations.input_gradient_s
        weight = durations.weight_gradient_s
        self.backward = [min(pair) for pair in zip(whole, half, strict=True)]
        self.work = [min(bw, b + w) for bw, b, w in zip(whole, half, weight, strict=True)]
        wires = [
            0.0 if source == target else seconds
            for (source, target), seconds in zip(
                pairwise(stage_ranks), durations.transfer_s, strict=True
            )
        ]
        hops = [own + wire for own, wire in zip(durations.forward_s, wires, strict=False)]
        self.there = list(accumulate(hops, initial=0.0))
        self.turn = self.there[-1] + durations.forward_s[-1]
        rises = [wire + own for wire, own in zip(wires, self.backward[1:], strict=True)]
        self.back = list(accumulate(rises, initial=self.backward[0]))
        self.close = self.work[0] - self.backward[0]

    def first_backward(self, stage: int) -> float:
        """Return when the backward pass of a stage can start at the earliest."""
        return self.turn + self.back[-1] - self.back[stage]

    def after_forward(self, stage: int) -> float:
        """Return the least time from the start of F on a stage to the end of the step."""
        return self.turn - self.there[stage] + self.back[-1] + self.close

    def after_backward(self, stage: int) -> float:
        """Return the least time from the end of B or BW on a stage to the end of the step."""
        return self.back[stage] - self.backward[stage] + self.close if stage else 0.0


def _links(
    stage_ranks: Sequence[int], num_microbatches: int, durations: Durations, paths: _Paths
) -> list[float]:
    """Return what each link takes: the least way to it, all its messages, the least way on."""
    links: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for stage, (source, target) in enumerate(pairwise(stage_ranks)):
        if source == target:
            continue
        seconds = durations.transfer_s[stage]
        activation = paths.there[stage] + durations.forward_s[stage]
        gradient = paths.first_backward(stage + 1) + paths.backward[stage + 1]
        links.setdefault((source, target), []).append(
            (activation, seconds, paths.after_forward(stage + 1))
        )
        after = paths.back[stage] + paths.close
        links.setdefault((target, source), []).append((gradient, seconds, after))
    return [
        min(before) + num_microbatches * sum(seconds) + min(after)
        for before, seconds, after in (zip(*messages, strict=True) for messages in links.values())
    ]


def _memory(
    stages: Sequence[int], num_microbatches: int, places: int, durations: Durations, paths: _Paths
) -> float:
    """Return how long a rank's cells need its `places`, one after another."""
    held = sum(
        paths.first_backward(stage) - paths.there[stage] + paths.work[stage] for stage in stages
    )
    take = min(durations.forward_s[stage] for stage in stages)
    free = min(
        min(durations.backward_s[stage], durations.weight_gradient_s[stage]) for stage in stages
    )
    empty = places * paths.there[stages[0]] + (take + free) * places * (places - 1) / 2
    return (num_microbatches * held + empty) / places


def _work(
    stages: Sequence[int], num_microbatches: int, places: int, durations: Durations, paths: _Paths
) -> float:
    """Return a rank's work with what it must idle before and behind it."""
    m, forward, weight = num_microbatches, durations.forward_s, durations.weight_gradient_s
    forwards = m * sum(forward[stage] for stage in stages)
    total = forwards + m * sum(paths.work[stage] for stage in stages)
    start, reached = paths.there[stages[0]], paths.first_backward(stages[-1])
    filled = min(_largest([forward[stage] for stage in stages], m, places), reached - start)

    weights = _largest([weight[stage] for stage in stages], m, places)
    extra = [
        durations.input_gradient_s[stage] / weight[stage]
        + 1
        - durations.backward_s[stage] / weight[stage]
        for stage in stages
        if weight[stage] > 0
    ]
    free_share = 1 - min(1.0, max(0.0, min(extra, default=1.0)))
    after_last_backward = paths.after_backward(stages[0])
    drain = after_last_backward - free_share * min(after_last_backward, weights)
    after_last_forward = paths.after_forward(stages[-1]) - forward[stages[-1]]
    last = after_last_forward - _largest([paths.work[stage] for stage in stages], m, places)
    all_fit = places == m * len(stages) and forwards <= filled * (1 + 1e-9)
    return total + max(
        start + max(drain, last), reached - filled + max(drain, 0.0 if all_fit else last)
    )


def _largest(seconds: Sequence[float], num_microbatches: int, count: int) -> float:
    """Return the sum of the `count` largest, where each is there once for every microbatch."""
    total, left = 0.0, count
    for one in sorted(seconds, reverse=True):
        taken = min(left, num_microbatches)
        total += taken * one
        left -= taken
    return total
