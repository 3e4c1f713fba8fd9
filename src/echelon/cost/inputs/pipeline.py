# SPDX-License-Identifier: Apache-2.0
"""Waiting in a pipeline, and what is in flight, by schedule: closed forms for arrays of plans.

F, B, W are the seconds of all layers of a rank for one microbatch: forward, gradients of inputs,
gradients of weights; p pipeline ranks, v virtual stages, m microbatches. Waiting is that of a whole
step; `schedule/` builds each of these, and says for which times the forms are exact (decision 018):

    naive                      (p - 1) m (F + B + W)
    gpipe, 1f1b                (p - 1) (F + B + W)
    interleaved, breadth-first (p - 1) (F + B + W) / v
    zb-h1                      (p - 1) max(F, B, F + B - W)
    zb-h2                      (p - 1) max(F, B - F, F + B - 2 W)
    zb-v                       (p - 1) F / 2 of two stages on a rank
    dualpipe                   (p / 2 - 1) (F + B - W), each rank having two stages
    dualpipe-v                 (p - 1) (F + B - W) / 2

In flight, in microbatches of all layers of the rank that holds most: 1 (naive); m (gpipe,
breadth-first); min(m, p) (1f1b, zb-h1, zb-v); min(m, p + (p - 1) / v) (interleaved);
min(m, 2 p - 1) (zb-h2); min(m, p + 1) of two half-stages (dualpipe, dualpipe-v). Sources: see
`schedule/`. A schedule names its `ClosedForms` (`Builder.closed_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.choices.registry import load_reference
from echelon.cost.inputs.numbers import LayoutNumbers, Num
from echelon.schedule.build import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleTimes:
    """Hold what waiting depends on, of each plan: arrays of one shape, or numbers."""

    ranks: Num
    """Pipeline ranks."""
    virtual: Num
    """Stages on a rank."""
    microbatches: Num
    """Microbatches of a step."""
    forward: Num
    """Seconds of F of one microbatch on a rank."""
    inputs: Num
    """Seconds of B."""
    weights: Num
    """Seconds of W."""

    @property
    def others(self) -> Num:
        """Return the pipeline ranks but one."""
        return self.ranks - 1.0

    @property
    def whole(self) -> Num:
        """Return the seconds of F, B and W."""
        return self.forward + self.inputs + self.weights

    @property
    def split(self) -> Num:
        """Return the seconds of F and B, where W fills as much as it takes."""
        return self.forward + self.inputs - self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForms:
    """Hold the closed forms of one schedule, over numbers or arrays of plans."""

    idle_s: Callable[[BubbleTimes], Num]
    """Seconds that a rank waits in a step."""
    in_flight: Callable[[Num, Num, Num], Num]
    """Microbatches of all layers that the fullest rank holds, of (p, v, m)."""
    waiting: Callable[[Num, Num], Num] | None = None
    """Microbatches that wait for W on the last rank, of (p, m); None where B and W are one."""


NAIVE = ClosedForms(
    idle_s=lambda t: t.others * t.microbatches * t.whole,
    in_flight=lambda p, v, m: np.minimum(m, 1.0),
)
GPIPE = ClosedForms(idle_s=lambda t: t.others * t.whole, in_flight=lambda p, v, m: m)
ONE_F_ONE_B = ClosedForms(idle_s=GPIPE.idle_s, in_flight=lambda p, v, m: np.minimum(m, p))
INTERLEAVED = ClosedForms(
    idle_s=lambda t: t.others * t.whole / t.virtual,
    in_flight=lambda p, v, m: np.minimum(m, p + (p - 1.0) / v),
)
BREADTH_FIRST = ClosedForms(idle_s=INTERLEAVED.idle_s, in_flight=GPIPE.in_flight)
ZB_H1 = ClosedForms(
    idle_s=lambda t: t.others * np.maximum(np.maximum(t.forward, t.inputs), t.split),
    in_flight=ONE_F_ONE_B.in_flight,
    waiting=np.minimum,
)
ZB_H2 = ClosedForms(
    idle_s=lambda t: (
        t.others * np.maximum(np.maximum(t.forward, t.inputs - t.forward), t.split - t.weights)
    ),
    in_flight=lambda p, v, m: np.minimum(m, 2.0 * p - 1.0),
    waiting=lambda p, m: np.minimum(m, 2.0 * p - 1.0),
)
ZB_V = ClosedForms(
    idle_s=lambda t: t.others * t.forward / 2.0,
    in_flight=ONE_F_ONE_B.in_flight,
    waiting=lambda p, m: np.clip(m - p + 1.0, 0.5, p),
)
DUALPIPE = ClosedForms(
    idle_s=lambda t: np.maximum(t.ranks / 2.0 - 1.0, 0.0) * np.maximum(t.split, 0.0),
    in_flight=lambda p, v, m: np.minimum(m, p + 1.0),
    waiting=lambda p, m: np.minimum(m, p / 2.0),
)
DUALPIPE_V = ClosedForms(
    idle_s=lambda t: t.others * np.maximum(t.split, 0.0) / 2.0,
    in_flight=DUALPIPE.in_flight,
    waiting=DUALPIPE.waiting,
)

_WRITTEN_OUT = {"auto": "zb-h1", "file": "1f1b"}
"""Whose closed forms stand for schedules that no builder makes: a search in the memory of 1F1B
finds about what ZB-H1 does."""


def schedule_index(schedule: str) -> float:
    """Return the number of a schedule in `LayoutNumbers.schedule`: its place in the registry."""
    return float(list(SCHEDULES).index(_WRITTEN_OUT.get(schedule, schedule)))


def crosses_itself(layout: LayoutNumbers) -> NDArray[np.bool_]:
    """Return whether each rank of a pipeline has the weights of two stages, one its mirror's."""
    return _schedule_is(layout, _crossing())


def has_both_ends(layout: LayoutNumbers) -> NDArray[np.bool_]:
    """Return whether the first rank of a pipeline has the embedding and the head."""
    return _schedule_is(layout, _bent())


def _schedule_is(layout: LayoutNumbers, wanted: Sequence[int]) -> NDArray[np.bool_]:
    """Return whether a pipeline's schedule is one of these, for ranks in a pipeline."""
    found = np.isin(np.asarray(layout.schedule), wanted)
    return np.asarray(found & (np.asarray(layout.pp) > 1.0))


def _crossing() -> list[int]:
    """Return the schedules of which each rank has the weights of two stages, by their places."""
    return [at for at, builder in enumerate(SCHEDULES.values()) if builder.stage_copies > 1]


def _bent() -> list[int]:
    """Return the schedules whose first rank has both ends of the model, by their places."""
    return [at for at, builder in enumerate(SCHEDULES.values()) if builder.ends_on_first_rank]


def bubble_seconds(layout: LayoutNumbers, forward: Num, inputs: Num, weights: Num) -> Num:
    """Return how long a rank waits in a step for its neighbours."""
    times = BubbleTimes(
        ranks=layout.pp,
        virtual=layout.virtual,
        microbatches=layout.microbatches,
        forward=forward,
        inputs=inputs,
        weights=weights,
    )
    return _select(layout, [lambda one=one: one.idle_s(times) for one in _closed_forms()])


def microbatches_in_flight(layout: LayoutNumbers) -> Num:
    """Return how many microbatches, of all its layers, the fullest rank keeps at most."""
    p, v, m = layout.pp, layout.virtual, layout.microbatches
    return _select(layout, [lambda one=one: one.in_flight(p, v, m) for one in _closed_forms()])


def microbatches_that_wait(layout: LayoutNumbers) -> Num:
    """Return how many microbatches wait for W on the last rank of a pipeline."""
    p, m = layout.pp, layout.microbatches
    found: Num = 0.0
    for index, forms in enumerate(_closed_forms()):
        if forms.waiting is not None:
            here = (np.asarray(layout.schedule) == index) & (np.asarray(p) > 1.0)
            found = np.where(here, forms.waiting(p, m), found)
    return found


def _closed_forms() -> list[ClosedForms]:
    return [load_reference(builder.closed_forms) for builder in SCHEDULES.values()]


TABLES_OF_SCHEDULES = (_closed_forms, _crossing, _bent)
"""What depends on nothing but which schedules there are."""


def _select(layout: LayoutNumbers, each: Sequence[Callable[[], Num]]) -> Num:
    index = np.asarray(layout.schedule).astype(np.int64)
    if index.ndim == 0:
        return each[int(index)]()
    return np.choose(index, [np.broadcast_to(np.asarray(one()), index.shape) for one in each])
