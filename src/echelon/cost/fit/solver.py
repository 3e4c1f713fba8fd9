"""Fit constants of a machine to measured seconds: bounded, with priors, on relative errors.

What is minimised is the sum over samples of a Huber loss of log(predicted / measured), so that a
microsecond counts as much as a second and one bad sample little, and of (log(constant / prior) /
width)^2: a constant on which no sample depends stays at its prior. Constants are searched by
their logarithms inside of their bounds (Levenberg-Marquardt steps, projected), so none can become
negative, or a share more than one. Source: Nocedal and Wright, Numerical Optimization (2006),
sections 10.3 and 16.7; Huber, Robust Estimation of a Location Parameter (1964).
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
"""Relative error beyond which a sample pulls with a constant force, not more with its distance."""
STEPS = 60  # iterations
ENOUGH = 1e-7
"""The descent ends where a step gains less than this share."""
_DIFFERENCE_STEP = 1e-4  # of a parameter, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Name one constant: its bounds, what it is likely to be, and how sure that is.

    `width` is the standard deviation of its logarithm: 0.7 is a factor of two.
    """

    name: str
    low: float
    high: float
    prior: float
    width: float = 1.0

    def __post_init__(self) -> None:
        """Check the order of the bounds."""
        assert 0.0 < self.low <= self.prior <= self.high, self


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
    weights: Sequence[float] | None = None,
    start: ConstantValues | None = None,
    together: Together | None = None,
) -> Fit:
    """Return the constants with which `predict` is nearest to the measured seconds.

    `predict` gives the seconds of all samples, in their order, for values of the constants. A
    sample counts as much as its weight (1 where none are given). The search begins at `start`, or
    at the priors and at points on either side of them. Constants that `together` gives one key are
    moved at once to see their slopes: no sample depends on two of them. Raises ValueError where a
    measured time is not positive.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    if not measured.size or not np.all(np.isfinite(measured) & (measured > 0.0)):
        raise ValueError("times to fit must be positive")
    each = np.ones_like(measured) if weights is None else np.asarray(weights, dtype=np.float64)
    problem = _Problem(constants, predict, np.log(measured), each)
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
        alone = np.ones(target.size, dtype=np.bool_)
        self._moves = [[(index, alone)] for index in range(len(self._names))]

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
        size = np.abs(self.check(point))
        huber = np.where(size <= BEND, size**2, BEND * (2.0 * size - BEND))
        fitted = np.sum(self._weights * huber)
        return float(fitted + BEND**2 * np.sum(self._away(point) ** 2))

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
        return (point - self.centre) / self._width

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
        weight = np.where(np.abs(here) <= BEND, 1.0, BEND / np.maximum(np.abs(here), 1e-300))
        weight = weight * self._weights
        pull = BEND**2 / self._width**2
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(pull)
        force = slopes.T @ (weight * here) + pull * (point - self.centre)
        # A constant at its bound that is pushed outwards stays, and the others move without it.
        held = ((point <= self.low) & (force > 0.0)) | ((point >= self.high) & (force < 0.0))
        free = ~held
        step = np.zeros_like(point)
        if np.any(free):
            inner = normal[np.ix_(free, free)]
            inner = inner + damping * np.diag(np.diag(inner) + 1e-12)
            step[free] = -np.linalg.solve(inner, force[free])
        return np.clip(step, -2.0, 2.0)
