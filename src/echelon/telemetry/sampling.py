"""Steps of a run whose events are kept: as many as a budget of bytes has room for.

The first steps are kept, the last, and steps after which the run saves or validates. Of the others
every k-th is: k is a power of two, and doubles whenever the steps to come, at the mean size of
those that were written, would not fit. So steps that one rank keeps with a large k are kept by
ranks with a smaller k, and all ranks have the same steps without a message. Where islands meet
after so many steps (local SGD), whole rounds are kept, as what is sent differs within a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.config.job import Job

WARM_UP = 8
"""Steps at the start of a run that are kept, in whole rounds."""


@dataclass(slots=True, kw_only=True)
class StepSampler:
    """Decide for one rank which steps it writes."""

    budget_bytes: float
    """Bytes that the files of this rank may take."""
    last_step: int
    """The last step of the run."""
    round_steps: int = 1
    """Steps that are kept or left together."""
    periods: tuple[int, ...] = ()
    """After so many steps the run saves or validates."""
    used_bytes: int = 0
    """Bytes of the files so far."""
    stride: int = 1
    """Of so many rounds one is kept."""
    stride_of_periods: int = 1
    """The same of rounds in which the run saves or validates."""
    _first: int | None = None
    """The round in which this start of the run began."""
    _round: int | None = None
    """The round that was asked for last."""
    _keeps: bool = True
    """Whether that round is kept."""
    _sizes: list[int] = field(default_factory=list[int])
    """Bytes of each round that was kept."""

    @classmethod
    def of_job(cls, job: Job, used_bytes: int) -> StepSampler:
        """Return the sampler of each rank of a job."""
        local = job.plan.mathematics.local_sgd
        every = (job.checkpoint.every, job.train.validate_every)
        return cls(
            budget_bytes=job.observe.events_budget_bytes / job.plan.mesh.world_size,
            last_step=job.train.steps,
            round_steps=local.every if local.active else 1,
            periods=tuple(one for one in every if one != "never"),
            used_bytes=used_bytes,
        )

    def keeps(self, step: int) -> bool:
        """Return whether the events of a step are written; steps are asked for in rising order."""
        number = (step - 1) // self.round_steps
        if number != self._round:
            self._round = number
            self._first = number if self._first is None else self._first
            if number >= self._warm_end:
                self._widen(number)
            self._keeps = self._keeps_round(number)
        return self._keeps

    def wrote(self, num_bytes: int) -> None:
        """Learn how many bytes were written of the round that was asked for last."""
        self.used_bytes += num_bytes
        if self._sizes:
            self._sizes[-1] += num_bytes

    def says(self) -> str:
        """Return which steps are kept from now on, in words."""
        if self.stride == 1:
            return "every step"
        unit = "step" if self.round_steps == 1 else f"round of {self.round_steps} steps"
        return f"1 {unit} of {self.stride}"

    @property
    def _warm_end(self) -> int:
        """Return the first round that may be left out."""
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
        # The last round has its place whatever else is written.
        room = self.used_bytes + 2 * self._mean() <= self.budget_bytes
        kept = number in (self._first, self._last_round) or (wanted and room)
        if kept:
            self._sizes.append(0)
        return kept

    def _due(self, number: int) -> int | None:
        """Return how often the run saved or validated before it does in a round; None: it does not.

        Of several periods the longest tells: it is kept the longest.
        """
        begin, end = number * self.round_steps, (number + 1) * self.round_steps
        due = [end // period for period in self.periods if end // period > begin // period]
        return min(due, default=None)

    def _mean(self) -> float:
        """Return the bytes of a mean round."""
        whole = [size for size in self._sizes if size]
        return sum(whole) / len(whole) if whole else 0.0

    def _widen(self, number: int) -> None:
        """Double the strides until what is to come fits."""
        left = self._last_round - number + 1
        while self._mean() and self._projected(left) > self.budget_bytes:
            if self.stride <= left:
                self.stride *= 2
            elif self.stride_of_periods <= left:
                self.stride_of_periods *= 2
            else:
                return

    def _projected(self, left: int) -> float:
        """Return the bytes of the files at the end of the run."""
        steps = left * self.round_steps
        special = sum(steps / max(period, self.round_steps) for period in self.periods)
        rounds = min(left, left / self.stride + special / self.stride_of_periods) + 1
        return self.used_bytes + rounds * self._mean()
