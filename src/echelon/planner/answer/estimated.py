# SPDX-License-Identifier: Apache-2.0
"""A plan of an answer: what it takes and how sure that is, each number with its band."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.core.units import gib
from echelon.planner.answer.recommend_text import percent_of_fit, plan_words
from echelon.planner.predict.bands import (
    BandedTerms,
    BandedValue,
    band_evidence,
    byte_term_bands,
    held_bytes_band,
    mfu_band,
    price_band,
    step_band,
    step_term_bands,
    tokens_per_s_band,
)
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EstimatedPlan:
    """Hold a plan of an answer, with what it takes.

    `str` says how it is split; `fits` is the probability that its fullest rank fits into the memory
    of a device; `preferred_for` is what it is better at than others: "recommended", "fastest",
    "leanest", "safest", "cheapest", or nothing. A number with a band has `value`, `low` and `high`:
    four of five measured runs lie inside.
    """

    request: SearchRequest
    ranked: RankedPlan
    preferred_for: tuple[str, ...]
    fits: float

    @property
    def plan(self) -> Plan:
        """Return the Plan: what `ec.prove`, `ec.train`, `ec.compare` and `ec.export` take."""
        assert self.ranked.plan is not None, "what is shown of an answer has become a Plan"
        return self.ranked.plan

    @property
    def devices(self) -> int:
        """Return how many devices it takes."""
        return self.ranked.candidate.devices

    @property
    def idle_devices(self) -> int:
        """Return how many devices of the cluster it leaves idle."""
        return self.request.cluster.num_devices - self.devices

    @property
    def step_s(self) -> BandedValue:
        """Return the seconds of a step."""
        return step_band(self.ranked.estimate)

    @property
    def seconds(self) -> BandedTerms:
        """Return the seconds of a step by term; their values add up to `step_s.value`."""
        return step_term_bands(self.ranked.estimate)

    @property
    def held_bytes(self) -> BandedValue:
        """Return the bytes that the fullest rank holds at its peak, as its driver shows them."""
        return held_bytes_band(self.ranked.estimate)

    @property
    def allocated_bytes(self) -> float:
        """Return what tensors have of them (`torch.cuda.max_memory_allocated`)."""
        return self.ranked.estimate.allocated_bytes

    @property
    def reserved_bytes(self) -> float:
        """Return what an allocator has reserved of them (`torch.cuda.max_memory_reserved`)."""
        return self.ranked.estimate.reserved_bytes

    @property
    def bytes(self) -> BandedTerms:
        """Return the bytes of the fullest rank by term; their values add up to `held_bytes.value`.

        What is counted, and not estimated, has a band without width.
        """
        return byte_term_bands(self.ranked.estimate)

    @property
    def memory_bytes(self) -> int:
        """Return the memory of a device."""
        return int(self.request.memory_bytes)

    @property
    def tokens_per_s_per_device(self) -> BandedValue:
        """Return the tokens of a device in a second."""
        return tokens_per_s_band(self.ranked.estimate)

    @property
    def mfu(self) -> BandedValue:
        """Return the share of the devices' peak that the model's own FLOPs are, 0 to 1."""
        return mfu_band(self.ranked.estimate)

    @property
    def price_of_a_million_tokens(self) -> BandedValue | None:
        """Return what a million tokens cost, in the currency of `price`; None without a price."""
        price = self.request.price
        return None if price is None else price_band(self.ranked.estimate, price)

    @property
    def nearest_run_was(self) -> tuple[str, ...]:
        """Return what the nearest measured run was, where it is far: `on A100`; else nothing."""
        return band_evidence(self.ranked.estimate.inputs).differences

    def __str__(self) -> str:
        """Return how the plan is split, as ``pp4 dp2 tp8s, ZeRO 1, 1f1b, microbatches of 1``."""
        return plan_words(self.ranked.candidate)

    def __repr__(self) -> str:
        """Return the plan in one line."""
        held, memory = gib(self.held_bytes.value), gib(self.memory_bytes)
        names = f"{', '.join(self.preferred_for)}: " if self.preferred_for else ""
        return (
            f"<{type(self).__name__} {names}{self}; {self.step_s.value:.4g} s a step, "
            f"{held} of {memory} GiB, fits: {percent_of_fit(self.fits)}>"
        )
