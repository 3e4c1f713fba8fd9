# SPDX-License-Identifier: Apache-2.0
"""The longest sequence of which a plan fits: lengths double, then the interval is halved.

Lengths are multiples of twice the devices. So context degree times tensor degree divides a length
wherever it divides the devices, and a longer sequence needs more memory under the same splits.
Rotary positions grow with the length; learned ones end where the model's table does. A batch that
nobody asked for keeps about its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from echelon.config.job import LENGTH_KEY, SEQUENCES_KEY
from echelon.core.errors import ConfigError
from echelon.planner.explain.no_plan import leanest_ranked
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest, batch_is_assumed, request_with_settings
from echelon.planner.search.search import first_that_fits, something_fits, world_sizes

_LEAST_STEP = 1024  # tokens
_RESOLUTION = 64
"""Parts of the longest sequence to within one of which it is known."""
_MOST_TOKENS = 2**40  # tokens
_POSITIONS_KEY = "model.max_positions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestSequence:
    """Hold the longest sequence of which a plan fits, and why the next one has none."""

    request: SearchRequest
    """The search with sequences of this length."""
    positions: int
    """Positions that the model has by itself."""
    too_long: int | None
    """The shortest length that was found to have no plan; None where positions end before."""
    leanest: RankedPlan | None
    """The plan that holds least at that length; None where rules refuse all."""

    @property
    def tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.request.mathematics.sequence_length


def longest_sequence(request: SearchRequest) -> LongestSequence | None:
    """Return the longest sequence with which a request has a plan; None without any."""
    lengths = _Lengths(request)
    low, high = lengths.first, None
    if lengths.fits(low):
        while (longer := lengths.twice(low)) > low:
            if not lengths.fits(longer):
                high = longer
                break
            low = longer
    else:
        while not lengths.fits(low):
            if low == lengths.step:
                return None
            low, high = lengths.rounded(low // 2), low
    while high is not None and high - low > max(lengths.step, low // _RESOLUTION):
        middle = lengths.rounded((low + high) // 2)
        if middle in (low, high):
            break
        low, high = (middle, high) if lengths.fits(middle) else (low, middle)
    return LongestSequence(
        request=lengths.request(low),
        positions=request.model.max_positions,
        too_long=high,
        leanest=None if high is None else lengths.leanest(high),
    )


class _Lengths:
    """The lengths that are tried, and for each whether a plan fits."""

    def __init__(self, request: SearchRequest) -> None:
        """Take a request, whose own length is tried first."""
        self._request = replace(request, objective="time")
        self._model, numbers = request.model, request.mathematics
        self._tokens = numbers.global_sequences * numbers.sequence_length
        devices = 2 * request.cluster.num_devices
        self.step = devices * ceil(_LEAST_STEP / devices)
        self._most = _MOST_TOKENS
        if self._model.positions == "learned":
            self._most = self._model.max_positions
            self.step = min(self.step, self._most)
        self.first = self.rounded(request.mathematics.sequence_length)

    def rounded(self, length: int) -> int:
        """Return the next shorter length that is tried."""
        return max(self.step, length // self.step * self.step)

    def twice(self, length: int) -> int:
        """Return twice a length, or the most positions."""
        return min(2 * length, self._most)

    def request(self, length: int) -> SearchRequest:
        """Return the search with sequences of a length; ConfigError where a rule breaks."""
        settings: dict[str, object] = {LENGTH_KEY: length}
        if length > self._model.max_positions:
            settings[_POSITIONS_KEY] = length
        if batch_is_assumed(self._request):
            # A power of two: every number of data ranks that divides more divides fewer.
            count = max(1, self._tokens // length)
            settings[SEQUENCES_KEY] = 1 << (count.bit_length() - 1)
        return request_with_settings(self._request, settings)

    def fits(self, length: int) -> bool:
        """True if a search with sequences of a length finds a plan."""
        try:
            request = self.request(length)
        except ConfigError:
            return False
        counts = world_sizes(request)
        return any(something_fits(request, count) for count in counts) and bool(
            first_that_fits(request)
        )

    def leanest(self, length: int) -> RankedPlan | None:
        """Return the plan with sequences of a length that holds least; None where none is legal."""
        try:
            return leanest_ranked(self.request(length))
        except ConfigError:
            return None
