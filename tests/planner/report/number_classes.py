# SPDX-License-Identifier: Apache-2.0
"""The class of every number of `echelon plan --json`: how it is known to be right.

A path names a leaf: `stages[].held[].bytes`; `*` is any key of a mapping, `**` everything below.
The first entry of `NUMBERS` that fits a path is its class. A leaf without a class fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import cast


class Known(StrEnum):
    """A way to know that a printed number is right."""

    INPUT = "input"
    """It repeats the request, the plan, or a choice of the search."""
    REHEARSED = "rehearsed"
    """`echelon rehearse` compares it with a rank, under this name."""
    PROVED = "proved"
    """`echelon prove` compares it with recorded ranks, by this rule."""
    ARITHMETIC = "arithmetic"
    """It follows from other numbers of the document: `require_agreement`."""
    TESTED = "tested"
    """A test computes it by hand."""
    ESTIMATE = "estimate"
    """It is an estimate, for this reason."""


@dataclass(frozen=True, slots=True)
class PrintedNumber:
    """The class of a leaf of a document."""

    path: str
    known: Known
    by: str

    def fits(self, path: str) -> bool:
        """True if the leaf at `path` is of this class."""
        return _pattern(self.path).fullmatch(path) is not None


@cache
def _pattern(path: str) -> re.Pattern[str]:
    words = {r"\*\*": ".*", r"\*": r"[^.\[\]]*"}
    text = re.escape(path)
    for word, pattern in words.items():
        text = text.replace(word, pattern)
    return re.compile(text)


_SECONDS = "seconds are a model, with bands of measured runs"

_Entries = tuple[tuple[str, Known, str], ...]

_ESTIMATE: _Entries = (
    ("step_s", Known.ARITHMETIC, "the sum of its terms"),
    ("seconds.*", Known.ESTIMATE, _SECONDS),
    ("held_bytes", Known.ARITHMETIC, "the sum of its terms"),
    ("reserved_bytes", Known.ARITHMETIC, "bytes held without the context and NCCL"),
    ("allocated_bytes", Known.ARITHMETIC, "bytes reserved without slack"),
    *(
        (f"bytes.{term}", Known.REHEARSED, name)
        for term, name in {
            "parameters": "parameters between steps",
            "gradients": "gradients between steps",
            "optimizer": "optimizer between steps",
            "gathered": "gathered parameters at the peak",
            "activations": "activations and messages at the peak",
            "messages": "activations and messages at the peak",
            "buffers": "buffers at the peak",
        }.items()
    ),
    ("bytes.*", Known.ESTIMATE, "memory of an allocator, a driver or NCCL"),
    ("*band*[]", Known.ARITHMETIC, "a band around its number"),
    ("*_bands.*[]", Known.ARITHMETIC, "a band around its number"),
    ("bands_rest_on.**", Known.INPUT, "measured runs near the plan"),
    ("tokens_per_s_per_device", Known.ARITHMETIC, "tokens / seconds / devices"),
    ("mfu", Known.ARITHMETIC, "FLOPs of weights and pairs / seconds / peak"),
    ("causal_mfu", Known.ARITHMETIC, "FLOPs of weights and pairs / seconds / peak"),
    ("mfu_counts", Known.INPUT, "the definition"),
)
"""Numbers of an estimate, of a run and of each plan of a search."""

_CHOICE: _Entries = (
    ("price_*", Known.ARITHMETIC, "seconds x devices x price / tokens"),
    *_ESTIMATE,
    ("devices", Known.ARITHMETIC, "degrees of the mesh, multiplied"),
    ("microbatches", Known.ARITHMETIC, "sequences / data ranks / sequences of a microbatch"),
    *(
        (name, Known.INPUT, "a choice of the search")
        for name in (
            *("mesh.*", "sequence_parallel", "context", "ulysses_degree", "expert_tp"),
            *("zero_stage", "optimizer_offload", "secondary_slices", "gather", "reduce"),
            *("schedule", "virtual_stages", "microbatch_sequences", "recompute_every"),
            *("recompute_operators[]", "timed", "stages[][]", "plan", "plan.**"),
        )
    ),
)


_RUN: _Entries = (
    ("plan.**", Known.INPUT, "the plan itself"),
    ("hash", Known.INPUT, "the plan's hash"),
    ("assumed[]", Known.INPUT, "defaults in words"),
    ("num_parameters", Known.ARITHMETIC, "elements of all tensors"),
    ("num_microbatches", Known.ARITHMETIC, "sequences / data ranks / sequences of a microbatch"),
    ("fits", Known.ARITHMETIC, "bytes against the memory of a device"),
    ("*_bytes_fit", Known.ARITHMETIC, "bytes against the memory of a device"),
    ("context", Known.INPUT, "no context ranks"),
    ("experts", Known.INPUT, "no experts"),
    ("context.positions_per_rank", Known.ARITHMETIC, "positions / context ranks"),
    ("context.imbalance", Known.ARITHMETIC, "least and most scores of a rank"),
    ("context.scores_by_rank[]", Known.ARITHMETIC, "pairs of the mask x heads"),
    ("context.*", Known.INPUT, "a choice of the plan"),
    ("experts.num_active_parameters", Known.ARITHMETIC, "elements that multiply a token"),
    ("experts.experts_per_rank", Known.ARITHMETIC, "experts / expert ranks"),
    ("experts.ranks_with_the_same_experts", Known.ARITHMETIC, "ranks of a stage / expert ranks"),
    ("experts.capacity", Known.ARITHMETIC, "factor x tokens x top_k / experts"),
    ("experts.*", Known.INPUT, "a choice of the plan"),
    ("stages[].pp_rank", Known.INPUT, "the place"),
    ("stages[].ranks[]", Known.ARITHMETIC, "each rank once"),
    ("stages[].stages[]", Known.ARITHMETIC, "each stage, on each of its ranks"),
    ("stages[].blocks[]", Known.ARITHMETIC, "the blocks of its stages"),
    ("*[].held[].bytes", Known.PROVED, "prove-bytes-held"),
    ("*[].held[].formula", Known.ARITHMETIC, "elements x bytes"),
    ("*[].held[].padding", Known.ARITHMETIC, "no more than the bytes"),
    ("stages[].held_bytes_by_pool.*", Known.ARITHMETIC, "the sum of its terms"),
    ("stages[].held_in_a_step_at_most[].bytes", Known.REHEARSED, "* in a step, at most"),
    ("*[].sent_bytes_per_step[].bytes", Known.ARITHMETIC, "times x each / steps"),
    ("*[].sent_bytes_per_step[].far", Known.REHEARSED, "sent over * to other nodes"),
    ("*[].sent_bytes_per_step[].count", Known.PROVED, "prove-bytes-sent"),
    ("*[].sent_bytes_per_step[].e*", Known.PROVED, "prove-bytes-sent"),
    ("stages[].sent_bytes_by_axis.*", Known.REHEARSED, "sent over *"),
    ("stages[].muon_bytes_by_rank.*", Known.PROVED, "prove-bytes-sent"),
    ("stages[].choices[].*_bytes", Known.TESTED, "tests/cost/bytes/test_held.py"),
    ("servers[].model_bytes_through_it_per_step", Known.TESTED, "tests/cost/bytes/test_servers.py"),
    *(
        (f"*[].{terms}[].{word}", Known.INPUT, "a name, a formula or a source in words")
        for terms, words in (
            ("held", ("name", "pool")),
            ("held_in_a_step_at_most", ("name", "pool", "formula", "padding")),
            ("sent_bytes_per_step", ("axis", "name", "formula", "source")),
        )
        for word in words
    ),
    *((f"stages[].choices[].{key}", Known.INPUT, "a setting") for key in ("setting", "value")),
    ("stages[].choices[].chosen", Known.INPUT, "a choice of the plan"),
    ("servers[].server", Known.INPUT, "the place"),
    ("servers[].rank", Known.INPUT, "the place"),
    *((f"estimate.{path}", known, by) for path, known, by in _ESTIMATE),
    ("pipeline.stages_of_rank[][]", Known.ARITHMETIC, "each stage, on each of its ranks"),
    ("pipeline.blocks[]", Known.ARITHMETIC, "all blocks of the model"),
    ("pipeline.*imbalance", Known.ESTIMATE, _SECONDS),
    ("pipeline.durations_s.*[]", Known.ESTIMATE, _SECONDS),
    ("pipeline.timing.makespan_s", Known.ESTIMATE, _SECONDS),
    ("pipeline.timing.bubble_fraction", Known.ARITHMETIC, "work over the makespan"),
    ("pipeline.timing.bubble_fraction_with_transfers", Known.ARITHMETIC, "work over the makespan"),
    (
        "pipeline.timing.bubble_fraction_of_equal_stages",
        Known.TESTED,
        "tests/schedule/test_simulate.py::test_both_definitions_of_the_bubble",
    ),
    ("pipeline.timing.peak_in_flight_of_rank[]", Known.REHEARSED, "activations held at once"),
    ("pipeline.timing.num_messages", Known.REHEARSED, "messages of the schedule"),
    ("pipeline.*", Known.INPUT, "a choice of the plan"),
    ("notes[].**", Known.TESTED, "tests/planner/lint/test_checks.py"),
    ("groups.*[][]", Known.ARITHMETIC, "each rank once"),
)

_RECOMMENDED, _PLANS = "recommended", "search.plans[]"
_SEARCH: _Entries = (
    *(
        (f"search.{name}", Known.INPUT, "the request, or a count of the search")
        for name in (
            *("schema", "model", "cluster", "devices", "memory_bytes", "global_sequences"),
            *("sequence_length", "objective", "trainer", "price_per_device_hour", "pins.*"),
            *("assumed[]", "interrupted", "seen", "refused.*"),
        )
    ),
    ("search.num_*parameters", Known.TESTED, "tests/core/test_parameters.py"),
    ("search.seconds", Known.ESTIMATE, "the clock of this search"),
    ("search.computed", Known.ARITHMETIC, "at most the number seen"),
    *((f"{_PLANS}.{path}", known, by) for path, known, by in _CHOICE),
    ("recommended.*fits", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.others[].fits", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.others[].preferred_for[]", Known.INPUT, "names"),
    ("recommended.sure", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.faster_share", Known.ESTIMATE, _SECONDS),
    ("recommended.noise", Known.ESTIMATE, _SECONDS),
    ("recommended.expected.*", Known.ESTIMATE, _SECONDS),
    ("recommended.longest_sequence.*", Known.ESTIMATE, "the longest that was looked at"),
    ("recommended.without_host.*", Known.ESTIMATE, _SECONDS),
    ("why.**", Known.ESTIMATE, "differences of two estimates"),
)

NUMBERS: tuple[PrintedNumber, ...] = tuple(
    PrintedNumber(*entry)
    for entry in (
        ("schema", Known.INPUT, "the version of the document"),
        ("command", Known.INPUT, "the command"),
        *_RUN,
        *_SEARCH,
    )
)
"""The class of each leaf, the first that fits."""


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path of each leaf of a JSON value, and the leaf; empty ones have none."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, object]", value).items():
            yield from leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for part in cast("list[object]", value):
            yield from leaves(part, f"{path}[]")
    else:
        yield path, value


def class_of(path: str) -> PrintedNumber | None:
    """Return the class of the leaf at a path; None where no entry fits.

    All plans of a search have the same leaves. Each of several sizes is a search.
    """
    if path.startswith("sizes[]."):
        path = path.removeprefix("sizes[].")
        path = path if path.startswith(_RECOMMENDED) else f"search.{path}"
    paths = [path]
    for place in ("search.front[]", f"{_RECOMMENDED}.others[].choice", _RECOMMENDED):
        if path.startswith(f"{place}."):
            paths.append(_PLANS + path.removeprefix(place))
    return next((number for same in paths for number in NUMBERS if number.fits(same)), None)
