# SPDX-License-Identifier: Apache-2.0
"""Sampling of steps: a run writes the events of whole steps, within a budget of bytes.

A rank writes the first steps, the last step, steps after which the run saves or validates, and
every k-th of the other steps. k is a power of two. It doubles when the remaining steps, at the mean
size of the written steps, would exceed the budget. Steps that a rank writes with a large k are also
written by ranks with a smaller k, so all ranks have common steps without a message. Local SGD sends
different bytes in the steps of a round, so its rounds are written whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.config.job import Job

WARM_UP = 8
"""First steps of a start of a run, all of which are written."""


@dataclass(slots=True, kw_only=True)
class StepSampler:
    """Selection of the steps that one rank writes."""

    budget_bytes: float
    """Most bytes of the files of this rank."""
    last_step: int
    """The last step of the run."""
    round_steps: int = 1
    """Steps of a round; a round is written whole or not at all."""
    periods: tuple[int, ...] = ()
    """Numbers of steps between checkpoints and between validations."""
    used_bytes: int = 0
    """Bytes of the files so far."""
    stride: int = 1
    """k: one of this number of rounds is written."""
    stride_of_periods: int = 1
    """The same for rounds in which the run saves or validates."""
    _first: int | None = None
    """First round of this start of the run."""
    _round: int | None = None
    """Round of the last call of `keeps`."""
    _keeps: bool = True
    """True if that round is written."""
    _sizes: list[int] = field(default_factory=list[int])
    """Bytes of each written round."""

    @classmethod
    def of_job(cls, job: Job, used_bytes: int) -> StepSampler:
        """Sampler of a rank of a job."""
        local = job.plan.mathematics.local_sgd
        every = (job.checkpoint.every, job.train.validate_every)
        return cls(
            budget_bytes=job.observe.events_budget_bytes / job.plan.mesh.world_size,
            last_step=job.train.steps,
            round_steps=local.every if local.active else 1,
            periods=tuple(period for period in every if period != "never"),
            used_bytes=used_bytes,
        )

    def keeps(self, step: int) -> bool:
        """True if the events of `step` are written; steps come in rising order."""
        number = (step - 1) // self.round_steps
        if number != self._round:
            self._round = number
            self._first = number if self._first is None else self._first
            if number >= self._warm_end:
                self._widen(number)
            self._keeps = self._keeps_round(number)
        return self._keeps

    def wrote(self, num_bytes: int) -> None:
        """Add bytes that were written of the current round."""
        self.used_bytes += num_bytes
        if self._sizes:
            self._sizes[-1] += num_bytes

    def says(self) -> str:
        """Sampled steps from now on, in words."""
        if self.stride == 1:
            return "every step"
        unit = "step" if self.round_steps == 1 else f"round of {self.round_steps} steps"
        return f"1 {unit} of {self.stride}"

    @property
    def _warm_end(self) -> int:
        """First round that may be left out."""
        return (self._first or 0) - (-WARM_UP // self.round_steps)

    @property
    def _last_round(self) -> int:
        return (self.last_step - 1) // self.round_steps

    def _keeps_round(self, number: int) -> bool:
        due = self._due(number)
        wanted = (
            number < self._warm_end
            or (number + 1) % self.stride == 0
            or (due is not None and due % self.stride_of_periods == 0)
        )
        # The last round is written in any case.
        room = self.used_bytes + 2 * self._mean() <= self.budget_bytes
        writes = number in (self._first, self._last_round) or (wanted and room)
        if writes:
            self._sizes.append(0)
        return writes

    def _due(self, number: int) -> int | None:
        """Number of times that the run saves or validates up to a round; None if not in this round.

        The longest period counts: its rounds are written the longest.
        """
        begin, end = number * self.round_steps, (number + 1) * self.round_steps
        due = [end // period for period in self.periods if end // period > begin // period]
        return min(due, default=None)

    def _mean(self) -> float:
        """Mean bytes of a written round."""
        sizes = [size for size in self._sizes if size]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def _widen(self, number: int) -> None:
        """Double the strides until the remaining rounds fit."""
        left = self._last_round - number + 1
        while self._mean() and self._projected(left) > self.budget_bytes:
            if self.stride <= left:
                self.stride *= 2
            elif self.stride_of_periods <= left:
                self.stride_of_periods *= 2
            else:
                return

    def _projected(self, left: int) -> float:
        """Bytes of the files at the end of the run."""
        steps = left * self.round_steps
        special = sum(steps / max(period, self.round_steps) for period in self.periods)
        rounds = min(left, left / self.stride + special / self.stride_of_periods) + 1
        return self.used_bytes + rounds * self._mean()
