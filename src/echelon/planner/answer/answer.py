# SPDX-License-Identifier: Apache-2.0
"""What `ec.plan` returns of a model on a cluster: the plan to run, and all that is known of it.

Everything is read from one record, the `Recommendation` that a search ends with: the page, the JSON
of `echelon plan --json`, the page of a notebook and the table are views of it. Of a model alone, on
a machine without a GPU that is known, there are four sizes, each a whole `PlanAnswer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any, cast

from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.optional import optional_package
from echelon.core.parameters import parameters_text
from echelon.core.plan import Plan
from echelon.core.units import gib
from echelon.planner.answer.legend import plan_cells, plan_numbers, sign_texts, words_text
from echelon.planner.answer.recommend_text import (
    percent_of_fit,
    plan_words,
    reasons,
    recommendation_text,
)
from echelon.planner.answer.search_json import (
    answer_json,
    choices_json,
    found_json,
    recommendation_json,
)
from echelon.planner.answer.search_text import HEADER
from echelon.planner.predict.bands import (
    BandedTerms,
    BandedValue,
    band_evidence,
    byte_term_bands,
    fit_probability,
    held_bytes_band,
    mfu_band,
    price_band,
    step_band,
    step_term_bands,
    tokens_per_s_band,
)
from echelon.planner.recommend.recommend import Recommendation
from echelon.planner.report.printed_numbers import require_agreement
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest
from echelon.planner.view.document import DataTable
from echelon.planner.view.text_layout import WIDTH, data_text, fill_text

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore # an optional package


RowValue = int | float | str | bool


class PlanNumbers(ABC):
    """What a plan of an answer takes. A number with a band has `value`, `low` and `high`."""

    __slots__ = ()

    @property
    @abstractmethod
    def _plan_meant(self) -> EstimatedPlan: ...

    @property
    def plan(self) -> Plan:
        """Return the Plan: what `ec.prove`, `ec.train`, `ec.compare` and `ec.export` take."""
        found = self._plan_meant.ranked.plan
        assert found is not None, "what is shown of an answer has become a Plan"
        return found

    @property
    def devices(self) -> int:
        """Return how many devices it takes."""
        return self._plan_meant.ranked.candidate.devices

    @property
    def idle_devices(self) -> int:
        """Return how many devices of the cluster it leaves idle."""
        return self._plan_meant.request.cluster.num_devices - self.devices

    @property
    def step_s(self) -> BandedValue:
        """Return the seconds of a step."""
        return step_band(self._plan_meant.ranked.estimate)

    @property
    def seconds(self) -> BandedTerms:
        """Return the seconds of a step by term; their values add up to `step_s.value`."""
        return step_term_bands(self._plan_meant.ranked.estimate)

    @property
    def held_bytes(self) -> BandedValue:
        """Return the bytes that the fullest rank holds at its peak, as its driver shows them."""
        return held_bytes_band(self._plan_meant.ranked.estimate)

    @property
    def allocated_bytes(self) -> float:
        """Return what tensors have of them (`torch.cuda.max_memory_allocated`)."""
        return self._plan_meant.ranked.estimate.allocated_bytes

    @property
    def reserved_bytes(self) -> float:
        """Return what an allocator has reserved of them (`torch.cuda.max_memory_reserved`)."""
        return self._plan_meant.ranked.estimate.reserved_bytes

    @property
    def bytes(self) -> BandedTerms:
        """Return the bytes of the fullest rank by term; their values add up to `held_bytes.value`.

        What is counted, and not estimated, has a band without width.
        """
        return byte_term_bands(self._plan_meant.ranked.estimate)

    @property
    def memory_bytes(self) -> int:
        """Return the memory of a device."""
        return int(self._plan_meant.request.memory_bytes)

    @property
    def tokens_per_s_per_device(self) -> BandedValue:
        """Return the tokens of a device in a second."""
        return tokens_per_s_band(self._plan_meant.ranked.estimate)

    @property
    def mfu(self) -> BandedValue:
        """Return the share of the devices' peak that the model's own FLOPs are, 0 to 1."""
        return mfu_band(self._plan_meant.ranked.estimate)

    @property
    def price_of_a_million_tokens(self) -> BandedValue | None:
        """Return what a million tokens cost, in the currency of `price`; None without a price."""
        one = self._plan_meant
        price = one.request.price
        return None if price is None else price_band(one.ranked.estimate, price)

    @property
    def nearest_run_was(self) -> tuple[str, ...]:
        """Return what the nearest measured run was, where it is far: `on A100`; else nothing."""
        return band_evidence(self._plan_meant.ranked.estimate.inputs).differences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PlanAnswer(PlanNumbers):
    """Hold the plan to run of a model on a cluster, what it takes, and what else there is.

    `print` shows it as text, a notebook as a page with figures. It can be given wherever a plan is
    taken: then its `plan` is. Numbers with a band have `value`, `low` and `high`: four of five
    measured runs lie inside.
    """

    found: Recommendation
    """What the search ended with."""
    command: str | None = None
    """The command line that asks for it; None where Python did."""

    @property
    def recommended(self) -> EstimatedPlan:
        """Return the plan to run; the numbers of an answer are those of it."""
        first = self.found.first
        return self._estimated(first.ranked, ("recommended",), first.fits)

    @property
    def _plan_meant(self) -> EstimatedPlan:
        return self.recommended

    @property
    def alternatives(self) -> tuple[EstimatedPlan, ...]:
        """Return the plans that are better at something: fastest, leanest, safest, cheapest."""
        return tuple(
            self._estimated(one.ranked, one.preferred_for, one.fits) for one in self.found.others
        )

    @property
    def plans(self) -> tuple[EstimatedPlan, ...]:
        """Return every plan found, once: the recommended, the alternatives, then the next best."""
        return tuple(self._all())

    @property
    def fits(self) -> float:
        """Return the probability that the recommended plan fits into memory, 0 to 1."""
        return self.found.first.fits

    @property
    def sure(self) -> bool:
        """Return whether it fits with the probability that is wanted of a recommended plan."""
        return self.found.sure

    @property
    def longest_sequence(self) -> int | None:
        """Return the tokens of the longest sequence of which a plan fits; None if nobody asked."""
        return None if self.found.longest is None else self.found.longest.tokens

    @property
    def why(self) -> str:
        """Return why this plan is recommended, in sentences."""
        return " ".join(reasons(self.found))

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return what was taken where nobody said: the batch, dtypes."""
        return self.found.answer.request.defaults_taken

    def to_json(self) -> dict[str, Any]:
        """Return the object that `echelon plan --json` prints, of the schema of `explain json`."""
        return found_json(self.found)

    def to_frame(self) -> DataFrame:  # pyright: ignore # unknown where pandas is not installed
        """Return a pandas DataFrame with one row for each of `plans`, in this order.

        The columns are the same for every answer, and what has a unit ends with it. First the
        choices of a plan, then its numbers, as `step_s`, `step_s_low` and `step_s_high` where they
        have a band; last every term, `TERM_s` of the step and `TERM_bytes` of the fullest rank.
        Raises EnvironmentProblem where pandas is not installed.
        """
        pandas = cast("Any", optional_package("pandas", extra="frames", purpose="a data frame"))
        return pandas.DataFrame([plan_row(one) for one in self.plans])

    def __str__(self) -> str:
        """Return the page that `echelon plan` prints."""
        return recommendation_text(self.found, self.command).rstrip("\n")

    def __repr__(self) -> str:
        """Return the answer in one line."""
        request = self.found.answer.request
        told = repr(self.recommended).partition("recommended: ")[2]
        return f"<{type(self).__name__} {request.model.name} on {request.cluster.name}: {told}"

    def _repr_html_(self) -> str | None:
        """Return the answer as a notebook shows it: its page."""
        return NOTEBOOK_VIEWS.html("answer", self)

    def _all(self) -> Iterator[EstimatedPlan]:
        known = [self.recommended, *self.alternatives]
        yield from known
        met = {one.ranked.candidate for one in known}
        request = self.found.answer.request
        for one in self.found.answer.ranked:
            if one.candidate not in met:
                met.add(one.candidate)
                yield self._estimated(one, (), fit_probability(one.estimate, request.memory_bytes))

    def _estimated(
        self, ranked: RankedPlan, preferred_for: tuple[str, ...], fits: float
    ) -> EstimatedPlan:
        request = self.found.answer.request
        return EstimatedPlan(request=request, ranked=ranked, preferred_for=preferred_for, fits=fits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EstimatedPlan(PlanNumbers):
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
    def _plan_meant(self) -> EstimatedPlan:
        return self

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


def plan_row(one: EstimatedPlan) -> dict[str, RowValue]:
    """Return a plan of an answer as a row: its choices, its numbers, then every term.

    A number with a band is three columns, as `step_s`, `step_s_low` and `step_s_high`; a term of
    the step is `TERM_s`, one of what the fullest rank holds `TERM_bytes`.
    """
    choices: dict[str, Any] = choices_json(one.ranked)
    mesh: Mapping[str, int] = choices.pop("mesh")
    del choices["devices"]
    return {
        "preferred_for": ", ".join(one.preferred_for),
        "plan": str(one),
        "devices": one.devices,
        "idle_devices": one.idle_devices,
        **mesh,
        **choices,
        "context": choices["context"] or "none",
        "recompute_every": one.ranked.candidate.recompute,
        "recompute_operators": " ".join(one.ranked.candidate.operators),
        **_banded("step_s", one.step_s),
        **_banded("tokens_per_s_per_device", one.tokens_per_s_per_device),
        **_banded("mfu", one.mfu),
        **_banded("price_of_a_million_tokens", one.price_of_a_million_tokens),
        **_banded("held_bytes", one.held_bytes),
        "allocated_bytes": one.ranked.estimate.allocated_bytes,
        "reserved_bytes": one.ranked.estimate.reserved_bytes,
        "device_memory_bytes": one.memory_bytes,
        "fit_probability": one.fits,
        **{f"{name}_s": seconds for name, seconds in one.ranked.estimate.seconds.items()},
        **{f"{name}_bytes": held for name, held in one.ranked.estimate.bytes.items()},
    }


def _banded(name: str, amount: BandedValue | None) -> dict[str, RowValue]:
    if amount is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), nan)
    return {name: amount.value, f"{name}_low": amount.low, f"{name}_high": amount.high}


_COLUMNS = (
    "tok/s: of a device. MFU: with full attention. GiB: of the fullest rank. mb: sequences of a "
    "microbatch. rec: what runs forward again."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SizesAnswer:
    """Hold what to run of a model on each of four clusters, where nobody named one.

    `sizes["8xh100"]` is the PlanAnswer of one; `print` and a notebook show all of them as a table.
    It stands for no plan: which of them is meant is for you to say.
    """

    found: tuple[Recommendation, ...]
    """What the searches ended with, the smallest cluster first."""
    unknown_gpus: str = ""
    """GPUs of this machine that the catalogue does not have, as ``2 x NVIDIA ...``."""

    @property
    def answers(self) -> Mapping[str, PlanAnswer]:
        """Return the answer of each cluster by its name, the smallest first."""
        return {one.answer.request.cluster.name: PlanAnswer(found=one) for one in self.found}

    def __getitem__(self, cluster: str) -> PlanAnswer:
        """Return the answer of a cluster; KeyError where it is none of these."""
        answers = self.answers
        if cluster not in answers:
            raise KeyError(f"{cluster!r} is none of {', '.join(answers)}")
        return answers[cluster]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the clusters, the smallest first."""
        yield from self.answers

    def __len__(self) -> int:
        """Return how many clusters there are."""
        return len(self.found)

    def to_json(self) -> dict[str, Any]:
        """Return what `echelon plan MODEL --json` prints of them."""
        return sizes_json(self.found)

    def to_frame(self) -> DataFrame:  # pyright: ignore # unknown where pandas is not installed
        """Return a pandas DataFrame with the recommended plan of each cluster, one a row.

        Its first column is `cluster`; the others are those of `PlanAnswer.to_frame`.
        """
        pandas = cast("Any", optional_package("pandas", extra="frames", purpose="a data frame"))
        rows = [
            {"cluster": name, **plan_row(answer.recommended)}
            for name, answer in self.answers.items()
        ]
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        """Return the page that `echelon plan MODEL` prints."""
        hint = "cluster={name!r}; any COUNTxDEVICE or a cluster file will do."
        return sizes_text(self.found, self.unknown_gpus, hint).rstrip("\n")

    def __repr__(self) -> str:
        """Return the clusters in one line."""
        model = self.found[0].answer.request.model.name
        return f"<{type(self).__name__} {model} on {', '.join(self)}>"

    def _repr_html_(self) -> str | None:
        """Return the table as a notebook shows it."""
        return NOTEBOOK_VIEWS.html("sizes", self)


def sizes_json(found: Sequence[Recommendation]) -> dict[str, Any]:
    """Return the answer for each cluster as JSON values."""
    sizes = [
        {**answer_json(size.answer), "recommended": recommendation_json(size)} for size in found
    ]
    require_agreement({"sizes": sizes})
    return {"sizes": sizes}


def sizes_text(
    found: Sequence[Recommendation], unknown_gpus: str, hint: str, *, columns: int = WIDTH
) -> str:
    """Return what to run on each cluster as a page; no line has more columns than there are.

    `hint` says how one asks for the whole answer of the cluster `{name}`.
    """
    last = found[-1].answer.request.cluster.name
    parts = [
        "\n".join(fill_text(line, columns=columns) for line in sizes_head(found[0], unknown_gpus)),
        data_text(sizes_table(found), columns=columns),
        fill_text(sizes_legend(found), columns=columns),
        fill_text(f"The whole answer: {hint.format(name=last)}", columns=columns),
    ]
    return "\n\n".join(parts) + "\n"


def sizes_head(first: Recommendation, unknown_gpus: str) -> Iterator[str]:
    """Yield what is searched for, and why on these clusters."""
    request = first.answer.request
    numbers = request.mathematics
    here = (
        f"{unknown_gpus} of this machine is not in the catalogue (`echelon calibrate` writes a "
        "file of it)"
        if unknown_gpus
        else "this machine has no GPU"
    )
    yield (
        f"{request.model.name}: {parameters_text(request.model)}, "
        f"{numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens a step, "
        f"by {request.trainer}."
    )
    yield (
        f"No cluster is named, and {here}: these are the smallest cluster of "
        f"{request.cluster.device.name} with a plan, and larger ones."
    )


def sizes_table(found: Sequence[Recommendation]) -> DataTable:
    """Return what to run on each cluster as a table, one a row."""
    rows: list[tuple[str, ...]] = []
    for one in found:
        choice, estimate = one.first.ranked.candidate, one.first.ranked.estimate
        rows.append(
            (
                one.answer.request.cluster.name,
                *map(words_text, plan_cells(choice)),
                *plan_numbers(estimate),
                percent_of_fit(one.first.fits),
            )
        )
    return DataTable.of(("cluster", *HEADER, "fits"), rows)


def sizes_legend(found: Sequence[Recommendation]) -> str:
    """Return what the heads and signs of the table mean."""
    cells = [cell for size in found for cell in plan_cells(size.first.ranked.candidate)]
    words = [word for cell in cells for word in cell]
    return " ".join([_COLUMNS, *sign_texts(words)])
