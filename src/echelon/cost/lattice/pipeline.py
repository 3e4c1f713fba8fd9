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
`schedule/`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.cost.lattice.numbers import LayoutNumbers, Num

SCHEDULES = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "breadth-first",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
)
"""Schedules by their index in `LayoutNumbers.schedule`."""


def index_of(schedule: str) -> float:
    """Return the index of a schedule's name."""
    return float(SCHEDULES.index(schedule))


def schedule_is(layout: LayoutNumbers, *names: str) -> NDArray[np.bool_]:
    """Return whether the schedule is one of these, for ranks in a pipeline."""
    found = np.isin(np.asarray(layout.schedule), [index_of(name) for name in names])
    return np.asarray(found & (np.asarray(layout.pp) > 1.0))


def idle_seconds(layout: LayoutNumbers, forward: Num, inputs: Num, weights: Num) -> Num:
    """Return how long a rank waits in a step for its neighbours."""
    p, v, m = layout.pp, layout.virtual, layout.microbatches
    whole = forward + inputs + weights
    split = forward + inputs - weights
    longer = np.maximum(forward, inputs)
    ranks = p - 1.0
    each = (
        ranks * m * whole,
        ranks * whole,
        ranks * whole,
        ranks * whole / v,
        ranks * whole / v,
        ranks * np.maximum(longer, split),
        ranks * np.maximum(np.maximum(forward, inputs - forward), split - weights),
        ranks * forward / 2.0,
        np.maximum(p / 2.0 - 1.0, 0.0) * np.maximum(split, 0.0),
        ranks * np.maximum(split, 0.0) / 2.0,
    )
    return _select(layout, each)


def in_flight(layout: LayoutNumbers) -> Num:
    """Return how many microbatches, of all its layers, the fullest rank keeps at most."""
    p, v, m = layout.pp, layout.virtual, layout.microbatches
    straight = np.minimum(m, p)
    each = (
        np.minimum(m, 1.0),
        m,
        straight,
        np.minimum(m, p + (p - 1.0) / v),
        m,
        straight,
        np.minimum(m, 2.0 * p - 1.0),
        straight,
        np.minimum(m, p + 1.0),
        np.minimum(m, p + 1.0),
    )
    return _select(layout, each)


def _select(layout: LayoutNumbers, each: tuple[Num, ...]) -> Num:
    index = np.asarray(layout.schedule).astype(np.int64)
    if index.ndim == 0:
        return each[int(index)]
    return np.choose(index, [np.broadcast_to(np.asarray(e), index.shape) for e in each])
