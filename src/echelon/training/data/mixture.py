# SPDX-License-Identifier: Apache-2.0
"""Which source each sequence of a step comes from: weights that may change at given steps.

A phase of a mixture has a weight for each source. Its sequences follow a pattern of 65,536 places,
in which a source has as many places as its weight says (the largest remainders are rounded up),
spread evenly: any stretch of sequences holds each source in its share, to one or two sequences. So
where sequence number i of step N comes from, and how many sequences its source gave before, is
arithmetic: nothing is drawn, nothing is kept, and the number of ranks has no part in it.

Shape suffixes: S sources, P places of the pattern, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from echelon.core.choices.data_mixture import MIXTURE_PLACES, MixturePhase, places_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pattern:
    """Hold the places of a phase: whose each is, and the how manyth of its source."""

    source_P: NDArray[np.int64]
    before_P: NDArray[np.int64]
    places_S: NDArray[np.int64]

    def first(self, count: int) -> NDArray[np.int64]:
        """Return how many of the first `count` sequences each source gives."""
        whole, rest = divmod(count, MIXTURE_PLACES)
        some_S = np.bincount(self.source_P[:rest], minlength=len(self.places_S))
        return whole * self.places_S + some_S


@cache
def _pattern(weights: tuple[float, ...]) -> _Pattern:
    places_S = np.array(places_of(weights), dtype=np.int64)
    source_P = np.repeat(np.arange(len(places_S)), places_S)
    before_P = np.concatenate([np.arange(count) for count in places_S])
    # Place k of a source with n of them stands at (k + 1/2) / n of the pattern.
    order_P = np.argsort((before_P + 0.5) / places_S[source_P], kind="stable")
    return _Pattern(source_P=source_P[order_P], before_P=before_P[order_P], places_S=places_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Say from which source each sequence of each step comes; the last phase has no end."""

    phases: tuple[MixturePhase, ...]

    def sequences(self, *, step: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source_B, number_B) of step `step` (from 0) with `count` sequences.

        `number` counts the sequences that the source gave before, over all steps of the run.
        """
        given_S = np.zeros(len(self.phases[0].weights), dtype=np.int64)
        start = 0
        for phase in self.phases:
            pattern = _pattern(phase.weights)
            if phase.until_step is None or step < phase.until_step:
                place_B = (step - start) * count + np.arange(count, dtype=np.int64)
                whole_B, rest_B = place_B // MIXTURE_PLACES, place_B % MIXTURE_PLACES
                source_B = pattern.source_P[rest_B]
                number_B = whole_B * pattern.places_S[source_B] + pattern.before_P[rest_B]
                return source_B, number_B + given_S[source_B]
            given_S += pattern.first((phase.until_step - start) * count)
            start = phase.until_step
        raise AssertionError("the last phase has no end")

    def given(self, *, steps: int, count: int) -> NDArray[np.int64]:
        """Return how many sequences each source gives in the first `steps` steps."""
        given_S = np.zeros(len(self.phases[0].weights), dtype=np.int64)
        start = 0
        for phase in self.phases:
            end = steps if phase.until_step is None else min(steps, phase.until_step)
            if end > start:
                given_S += _pattern(phase.weights).first((end - start) * count)
                start = end
        return given_S

    def most_in_a_step(self, count: int) -> NDArray[np.int64]:
        """Return the most sequences of one step that each source may give, of `count`."""
        shares = np.array([places_of(phase.weights) for phase in self.phases]).max(axis=0)
        return -(-shares * count // MIXTURE_PLACES)


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights so that they add up to one."""
    total = sum(weights)
    return tuple(weight / total for weight in weights)
