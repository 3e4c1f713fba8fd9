# SPDX-License-Identifier: Apache-2.0
"""Fit constants of a machine to measured seconds: bounded, with priors, on relative errors.

What is minimised is the sum over samples of a loss of log(predicted / measured), so that a
microsecond counts as much as a second: its square, and a logarithm from BEND on, so that one bad
sample counts little (Lange et al., "Robust Statistical Modeling Using the t Distribution", 1989);
and of (log(constant / prior) / width)^2: a constant on which no sample depends stays at its prior.
Constants are searched by their logarithms inside of their bounds (Levenberg-Marquardt steps,
projected), so none can become negative, or a share more than one. Source: Nocedal and Wright,
Numerical Optimization (2006), sections 10.3 and 16.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ConstantValues = Mapping[str, float]
Predict = Callable[[ConstantValues], Array]
Mask = NDArray[np.bool_]
Together = Mapping[str, tuple[str, Mask]]
"""By constant: the key of those that are moved at once, and the samples that depend on it."""

BEND = 0.15
"""Relative error beyond which a sample pulls the less the farther it is."""
STEPS = 60  # iterations
ENOUGH = 1e-7
"""The descent ends where a step gains less than this share."""
_DIFFERENCE_STEP = 1e-4  # of a parameter, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Name one constant: its bounds, what it is likely to be, and how sure that is.

    `width` is the standard deviation of its logarithm: 0.7 is a factor of two. With a `parent`,
    another constant, it is that of the logarithm of their ratio, which is likely to be that of
    their priors: so what samples tell of its siblings moves a constant of which they tell nothing
    (Gelman and Hill, Data Analysis Using Regression and Multilevel Models, 2006, chapter 12).
    """

    name: str
    low: float
    high: float
    prior: float
    width: float = 1.0
    parent: str = ""

    def __post_init__(self) -> None:
        """Check the order of the bounds."""
        assert 0.0 < self.low <= self.prior <= self.high, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """State which samples share an error, such as those of one publisher, and how large it is.

    `numbers` give the group of each sample, from 0 up; `alone` is the deviation of the logarithm of
    each sample by itself, `shared` that of what a group shares. So n samples of a group tell of its
    level as much as one sample does whose deviation is their shared one, and of differences inside
    of it as much as n (the random intercept of a mixed model; Gelman and Hill, 2006, chapter 12).
    """

    numbers: NDArray[np.int64]
    alone: float | Array
    shared: float

    def settled(self, values: Array) -> Array:
        """Return values [samples] or [samples, n], what groups share of them made smaller."""
        each = np.broadcast_to(np.asarray(self.alone), self.numbers.shape) ** -2.0
        sure = np.bincount(self.numbers, weights=each)
        member = (np.arange(sure.size)[:, None] == self.numbers[None, :]) * each[None, :]
        share = (1.0 - 1.0 / np.sqrt(1.0 + sure * self.shared**2)) / sure
        off = (member * share[:, None]) @ values
        return values - off[self.numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Hold what was found: the constants, and predicted / measured - 1 of each sample."""

    values: ConstantValues
    errors: tuple[float, ...]
    at_bound: tuple[str, ...]


def fit(
    constants: Sequence[Constant],
    predict: Predict,
    measured_s: Sequence[float],
    *,
    weights: Sequence[float] | Groups | None = None,
    start: ConstantValues | None = None,
    together: Together | None = None,
) -> Fit:
    """Return the constants with which `predict` is nearest to the measured seconds.

    `predict` gives the seconds of all samples, in their order, for values of the constants. A
    sample counts as much as its weight (1 where none are given), or as its group says. The search
    begins at `start`, or at the priors and at points on either side of them. Constants that
    `together` gives one key are moved at once to see their slopes: no sample depends on two of
    them. Raises ValueError where a measured time is not positive.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    if not measured.size or not np.all(np.isfinite(measured) & (measured > 0.0)):
        raise ValueError("times to fit must be positive")
    groups = weights if isinstance(weights, Groups) else None
    each = np.ones_like(measured) * (1.0 if weights is None else _each(weights))
    problem = _Problem(constants, predict, np.log(measured), each)
    problem.groups = groups
    if together is not None:
        problem.move_together(together)
    begin = problem.starts() if start is None else [problem.point(start)]
    point = begin[0]
    for one in begin:
        found = problem.descend(one)
        if problem.loss(found) < problem.loss(point):
            point = found
    values = problem.values(point)
    margin = 1e-6 * np.maximum(problem.high - problem.low, 1.0)
    bound = (point <= problem.low + margin) | (point >= problem.high - margin)
    return Fit(
        values=values,
        errors=tuple(map(float, np.exp(problem.check(point)) - 1.0)),
        at_bound=tuple(
            one.name
            for one, edge in zip(constants, bound, strict=True)
            if edge and one.low < one.high
        ),
    )


def relative_errors(predicted: Array, measured_s: Sequence[float]) -> tuple[float, ...]:
    """Return predicted / measured - 1 of each sample."""
    return tuple(map(float, predicted / np.asarray(measured_s, dtype=np.float64) - 1.0))


def _each(weights: Sequence[float] | Groups) -> Array:
    """Return how much samples count: one number for all where groups say how far off they are."""
    if isinstance(weights, Groups):
        return np.asarray((BEND / weights.alone) ** 2)
    return np.asarray(weights, dtype=np.float64)


class _Problem:
    """Hold one problem in logarithms of its constants."""

    def __init__(
        self, constants: Sequence[Constant], predict: Predict, target: Array, weights: Array
    ) -> None:
        self._names = [one.name for one in constants]
        self._predict, self._target, self._weights = predict, target, weights
        self.low = np.log([one.low for one in constants])
        self.high = np.log([one.high for one in constants])
        self.centre = np.log([one.prior for one in constants])
        self._width = np.asarray([one.width for one in constants])
        # Each row of `_links`: a constant, less its parent where it has one.
        self._links = np.eye(len(constants))
        for index, one in enumerate(constants):
            if one.parent:
                self._links[index, self._names.index(one.parent)] = -1.0
        alone = np.ones(target.size, dtype=np.bool_)
        self._moves = [[(index, alone)] for index in range(len(self._names))]
        self.groups: Groups | None = None

    def move_together(self, together: Together) -> None:
        """Move constants of one key at once: each has the samples that depend on it."""
        found: dict[str, list[tuple[int, Mask]]] = {}
        for index, name in enumerate(self._names):
            key, mask = together[name]
            found.setdefault(key, []).append((index, mask))
        self._moves = list(found.values())

    def values(self, point: Array) -> dict[str, float]:
        return dict(zip(self._names, map(float, np.exp(point)), strict=True))

    def check(self, point: Array) -> Array:
        predicted = np.asarray(self._predict(self.values(point)), dtype=np.float64)
        return np.log(np.maximum(predicted, 1e-300)) - self._target

    def loss(self, point: Array) -> float:
        size = np.abs(self._settled(self.check(point)))
        far = np.maximum(size, BEND) / BEND
        each = np.where(size <= BEND, size**2, BEND**2 * (1.0 + 2.0 * np.log(far)))
        fitted = np.sum(self._weights * each)
        return float(fitted + BEND**2 * np.sum(self._away(point) ** 2))

    def _settled(self, values: Array) -> Array:
        return values if self.groups is None else self.groups.settled(values)

    def point(self, values: ConstantValues) -> Array:
        """Return the logarithms of values, inside of their bounds."""
        return np.clip(np.log([values[name] for name in self._names]), self.low, self.high)

    def starts(self) -> list[Array]:
        """Return the priors, and points a factor away from them in each direction."""
        away = (self.centre - self._width, self.centre + self._width)
        return [self.centre, *(np.clip(point, self.low, self.high) for point in away)]

    def descend(self, point: Array) -> Array:
        """Return the end of the descent from `point`."""
        damping, best = 1e-2, self.loss(point)
        for _ in range(STEPS):
            step = self._step(point, damping)
            after = np.clip(point + step, self.low, self.high)
            loss = self.loss(after)
            if loss < best:
                small = best - loss < ENOUGH * best
                point, best, damping = after, loss, max(damping / 4.0, 1e-9)
                if small:
                    break
            else:
                damping *= 4.0
                if damping > 1e8:
                    break
        return point

    def _away(self, point: Array) -> Array:
        return self._links @ (point - self.centre) / self._width

    def _step(self, point: Array, damping: float) -> Array:
        here = self.check(point)
        slopes = np.zeros((here.size, point.size))
        for move in self._moves:
            moved = point.copy()
            for index, _ in move:
                moved[index] += (
                    _DIFFERENCE_STEP
                    if point[index] + _DIFFERENCE_STEP <= self.high[index]
                    else -_DIFFERENCE_STEP
                )
            change = self.check(moved) - here
            for index, mask in move:
                slopes[mask, index] = change[mask] / (moved[index] - point[index])
        here, slopes = self._settled(here), self._settled(slopes)
        weight = (BEND / np.maximum(np.abs(here), BEND)) ** 2
        weight = weight * self._weights
        pull = self._links.T * (BEND**2 / self._width**2)
        normal = slopes.T @ (weight[:, None] * slopes) + pull @ self._links
        force = slopes.T @ (weight * here) + pull @ (self._links @ (point - self.centre))
        # A constant at its bound that is pushed outwards stays, and the others move without it.
        held = ((point <= self.low) & (force > 0.0)) | ((point >= self.high) & (force < 0.0))
        free = ~held
        step = np.zeros_like(point)
        if np.any(free):
            inner = normal[np.ix_(free, free)]
            inner = inner + damping * np.diag(np.diag(inner) + 1e-12)
            step[free] = -np.linalg.solve(inner, force[free])
        return np.clip(step, -2.0, 2.0)
