# SPDX-License-Identifier: Apache-2.0
"""What a long run loses to interruptions, and to a plan that does not fit after all.

A run on N devices is interrupted every M = 1 / (N r) seconds, with r interruptions of a device in a
second. It then starts anew from its last checkpoint: half of the interval between two is lost, and
the seconds of a restart. Rare checkpoints lose much, frequent ones take long to write: the least is
lost at an interval of sqrt(2 w M), with w seconds for a checkpoint (Young, "A first order
approximation to the optimum checkpoint interval", 1974; Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", 2006). Where interruptions come at random, at a
rate of 1 / M, also in restarts and while a checkpoint is written, a second of work then takes

    exp(restart / M) x M / interval x (exp((interval + w) / M) - 1)

seconds (Daly, 2006, section 2). For Llama 3 405B on 16,384 devices that is 1.09: 92 % of the time
is effective, where the paper says more than 90 %.

Devices that stay idle interrupt nothing, and are spare: one of them takes the place of what failed
within a restart. How long a run without any waits for a repair, nobody publishes: it is not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

INTERRUPTIONS = 419
"""Unexpected interruptions of the run of Llama 3 405B (Llama Team, "The Llama 3 Herd of Models",
2024, table 5), in `INTERRUPTED_DAYS` on `INTERRUPTED_DEVICES`."""
INTERRUPTED_DAYS = 54  # days
INTERRUPTED_DEVICES = 16384  # devices
_DAY_S = 86400.0  # seconds
STORED_BYTES_PER_S = 2e12 / 16384
"""Bytes that storage takes from each device in a second: the same paper, section 3.3.1, 2 TB/s
sustained beside 16,384 devices."""
RESTART_S = 660.0
"""Seconds from an interruption to the next step: automatic restarts of 504 B200 followed each other
after a median of 11 minutes ("From Detection to Recovery", arXiv:2605.09370, 2026); MegaScale took
less than 10 to detect a failure and find its cause (Jiang et al., 2024)."""
_ENDLESS = 100.0
"""Restarts, or intervals, in the time between two interruptions above which nothing gets done."""
TOKENS_PER_PARAMETER = 20.0
"""Tokens of a run for each parameter that a token meets (Hoffmann et al., 2022)."""
RETRIED_SLOWER = 4.0 / 3.0
"""Times the seconds of a plan that the one takes which replaces it where it does not fit: all
blocks run forward again, which is a third of forward and backward (Chen et al., 2016)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """Hold how often a run is interrupted and writes a checkpoint, and how long that takes."""

    between_s: float
    """Seconds from one interruption to the next, on average."""
    write_s: float
    """Seconds in which a checkpoint is written."""
    restart_s: float = RESTART_S
    """Seconds from an interruption to the next step."""

    @property
    def interval_s(self) -> float:
        """Return the seconds of work between two checkpoints at which the least is lost."""
        return sqrt(2.0 * self.write_s * self.between_s)

    @property
    def lost_s(self) -> float:
        """Return the seconds that an interruption costs on average, where it is a rare one.

        They are those of half an interval, and of a restart.
        """
        return self.interval_s / 2.0 + self.restart_s

    @property
    def slowdown(self) -> float:
        """Return the seconds of a second of work; infinite where a run never gets on."""
        mean = self.between_s
        exponents = (self.restart_s / mean, (self.interval_s + self.write_s) / mean)
        if max(exponents) > _ENDLESS:
            return inf
        return exp(exponents[0]) * mean / self.interval_s * expm1(exponents[1])


def interruptions(devices: int, checkpoint_bytes: float) -> Interruptions:
    """Return how a run on so many devices is interrupted, all of which write its checkpoints."""
    each_s = INTERRUPTED_DAYS * _DAY_S * INTERRUPTED_DEVICES / INTERRUPTIONS
    return Interruptions(
        between_s=each_s / devices, write_s=checkpoint_bytes / (devices * STORED_BYTES_PER_S)
    )


def checkpoint_bytes(num_parameters: float, state_bytes: float) -> float:
    """Return the bytes of a checkpoint: the optimizer state of every weight, with its master."""
    return num_parameters * state_bytes


def run_steps(num_active_parameters: float, tokens_of_step: float) -> float:
    """Return the steps of a run of as many tokens as its model is worth."""
    return max(1.0, TOKENS_PER_PARAMETER * num_active_parameters / tokens_of_step)


def risk_slowdown(fits: float) -> float:
    """Return the seconds of a second of work, with what follows where a plan does not fit."""
    return fits + (1.0 - fits) * RETRIED_SLOWER


def retry_seconds(fits: float, steps: float) -> float:
    """Return the seconds that a step takes more because a plan may have been tried for nothing."""
    return (1.0 - fits) * RESTART_S / steps
