"""What a plan takes: seconds of a step and bytes of its fullest rank, by term, with a band.

The terms are those of `cost/lattice/`, and add up to the totals exactly. The band is what the
trainer leaves open: a step is not shorter than with everything hidden that can be hidden behind
compute, nor longer than with nothing hidden; an allocator holds back nothing, or twice its usual
slack. How far estimates are from measured runs, `bench/planner_accuracy.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from echelon.core.cluster import Cluster
from echelon.core.plan import Mathematics, Plan
from echelon.cost.flops import model_flops_per_token
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.of_cluster import peak_flops
from echelon.cost.lattice.of_plan import work_of
from echelon.cost.lattice.software import Software
from echelon.cost.lattice.step import step_seconds
from echelon.planner.closed_bytes import OURS, closed_bytes

OVERLAPS = ("reduce_overlap", "gather_overlap", "tensor_overlap", "pipeline_overlap")
"""What a trainer hides behind compute."""
_WHOLE = ("fused_share", "reduce_share", "gather_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Give the least and the most that a quantity can be."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Hold what a step of a plan takes and what its fullest rank holds, by term.

    `work` is what the formulas were given: what would be with other numbers can be asked of it.
    """

    work: Work
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    devices: int
    tokens: int
    model_flops: float
    peak_flops: float

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes_held(self) -> float:
        """Return the bytes that the fullest rank holds at its peak."""
        return sum(self.bytes.values())

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of all devices in a second."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Return the tokens of a device in a second."""
        return self.tokens_per_s / self.devices

    @property
    def mfu(self) -> float:
        """Return the share of the devices' peak that the model's own FLOPs are.

        Chowdhery et al., PaLM (2022), appendix B: recompute does not count.
        """
        return self.model_flops / (self.step_s * self.devices * self.peak_flops)

    @property
    def step_band(self) -> Band:
        """Return how short and how long a step can be, by what is hidden behind compute."""
        closed = _step_s(self.work)
        now = self.step_s
        hidden = now + _step_s(self.work, 1.0) - closed
        shown = now + _step_s(self.work, 0.0) - closed
        return Band(low=min(hidden, now), high=max(shown, now))

    @property
    def bytes_band(self) -> Band:
        """Return how little and how much is held, by what an allocator holds back."""
        slack, held = self.bytes["slack"], self.bytes_held
        return Band(low=held - slack, high=held + slack)

    def token_price(self, price_per_device_hour: float) -> float:
        """Return what a million tokens cost."""
        return 1e6 * price_per_device_hour / 3600.0 / self.tokens_per_s_per_device


def estimate(plan: Plan, software: Software | None = None) -> Estimate:
    """Return what a plan takes by closed forms, by default those of our own trainer."""
    facts = software or on_devices(FRAMEWORKS[OURS], plan.cluster)
    return estimate_work(work_of(plan, facts), plan.mathematics, plan.cluster)


def on_devices(software: Software, cluster: Cluster, *, trainer: str = OURS) -> Software:
    """Return the facts of a trainer on the devices of a cluster.

    The context that a device driver takes, and the buffers of NCCL, are there on GPUs only. On
    processors the host is the device, and what is sent is work of the cores that compute: nothing
    hides behind anything. What was measured there of our trainer counts more than what is usual.
    """
    if cluster.backend == "gloo":
        software = replace(
            software, context_bytes=0.0, host_adds=1.0, interference=0.0, by_pairs=1.0
        )
        software = replace(software, adding_bytes=8.0, pair_hops=0.25)
        software = replace(software, **dict.fromkeys(OVERLAPS, 0.0), **dict.fromkeys(_WHOLE, 1.0))
    return replace(software, **dict(cluster.trainer)) if trainer == OURS else software


def estimate_work(
    work: Work, mathematics: Mathematics, cluster: Cluster, *, trainer: str = OURS
) -> Estimate:
    """Return what one plan takes whose numbers are those of `work`."""
    seconds = _single(step_seconds(work).terms)
    held = _single(closed_bytes(work, trainer).terms)
    tokens = mathematics.global_sequences * mathematics.sequence_length
    flops = model_flops_per_token(mathematics.model, mathematics.sequence_length)
    return Estimate(
        work=work,
        seconds=seconds,
        bytes=held,
        devices=round(float(work.layout.devices)),
        tokens=tokens,
        model_flops=flops * tokens,
        peak_flops=peak_flops(cluster, mathematics.precision.parameters),
    )


def with_places(estimate: Estimate, places: Sequence[Mapping[str, float]]) -> Estimate:
    """Return an estimate with the bytes of its fullest place, of those that lists give by term.

    What an allocator holds back and a device's context takes come on top, as in closed forms.
    """
    fullest = max(places, key=lambda terms: sum(terms.values()))
    software, used = estimate.work.software, sum(fullest.values())
    beside = {"slack": software.slack * used, "context": software.context_bytes}
    return replace(estimate, bytes={**fullest, **_single(beside)})


def _single(terms: Mapping[str, Num]) -> dict[str, float]:
    """Return terms of one plan as plain numbers."""
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in terms.items()}


def _step_s(work: Work, hidden: float | None = None) -> float:
    """Return the seconds of a step, of which so much is hidden as can be (1), or nothing (0)."""
    if hidden is not None:
        software = replace(work.software, **dict.fromkeys(OVERLAPS, hidden))
        work = replace(work, software=software)
    return sum(_single(step_seconds(work).terms).values())
