# SPDX-License-Identifier: Apache-2.0
"""What holds of claims about pipelines: builders, their closed forms, and the simulator."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.handbook.errata.claims import Formula, with_named_inputs
from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.builder import Builder
from echelon.schedule.check import peak_in_flight_per_stage
from echelon.schedule.simulate import Durations, Simulation, simulate


def _built(name: str, ranks: int, microbatches: int) -> Builder:
    return builder_of(name, num_stages=ranks, num_ranks=ranks, num_microbatches=microbatches)


def _scheduled(name: str, ranks: int, microbatches: int) -> Schedule:
    return build_schedule(name, num_stages=ranks, num_ranks=ranks, num_microbatches=microbatches)


def _simulated(name: str, ranks: int, microbatches: int, backward_s: float = 2.0) -> Simulation:
    durations = Durations.uniform(ranks, backward_s=backward_s)
    return simulate(_scheduled(name, ranks, microbatches), durations)


def _in_flight(name: str, ranks: int, microbatches: int) -> list[int]:
    return list(peak_in_flight_per_stage(_scheduled(name, ranks, microbatches)))


def _same_bubble(p: int, m: int) -> dict[str, float]:
    return {
        "gpipe": _simulated("gpipe", p, m, 1.0).bubble_fraction,
        "1f1b": _simulated("1f1b", p, m, 1.0).bubble_fraction,
        "gpipe_backward_2x": _simulated("gpipe", p, m).bubble_fraction,
        "1f1b_backward_2x": _simulated("1f1b", p, m).bubble_fraction,
    }


def _grid(gbs: int, mbs: int, dp: int, pp: int) -> dict[str, float]:
    count = gbs // (mbs * dp)
    return {"m": count, "bubble_fraction": _built("1f1b", pp, count).bubble_fraction()}


def _held(N: int, M: int) -> tuple[list[int], list[int]]:
    return _in_flight("gpipe", N, M), _in_flight("1f1b", N, M)


def _ratios(N: int, M: int) -> dict[str, float]:
    gpipe, other = _held(N, M)
    return {"peak_ratio": max(gpipe) / max(other), "sum_ratio": sum(gpipe) / sum(other)}


def _totals(N: int, M: int) -> dict[str, int]:
    gpipe, other = _held(N, M)
    return {"gpipe_total": sum(gpipe), "1f1b_total": sum(other), "1f1b_most": max(other)}


def _both_definitions(p: int, m: int) -> dict[str, float]:
    form, run = _built("1f1b", p, m), _simulated("gpipe", p, m)
    return {
        "overhead": form.bubble_overhead(),
        "fraction": form.bubble_fraction(),
        "sim_overhead": run.bubble_overhead,
        "sim_fraction": run.bubble_fraction,
    }


BUBBLE: Mapping[str, Formula] = {
    "distributed-20": lambda i: _built("naive", i.p, 1).bubble_fraction(),
    "distributed-21": lambda i: {
        "overhead_vs_ideal": _built("gpipe", i.p, i.m).bubble_overhead(),
        "fraction_of_total": _built("gpipe", i.p, i.m).bubble_fraction(),
    },
    "distributed-22": with_named_inputs(_same_bubble),
    "distributed-23": lambda i: 1 - _built("gpipe", i.p, i.m).bubble_fraction(),
    "distributed-24": lambda i: {
        "backward_1x": _simulated("gpipe", i.p, i.m, 1.0).makespan_s,
        "backward_2x": _simulated("gpipe", i.p, i.m).makespan_s,
    },
    "distributed-25": lambda i: {
        "1f1b": _in_flight("1f1b", i.p, i.m),
        "gpipe": _in_flight("gpipe", i.p, i.m),
    },
    "distributed-26": lambda i: [_built("1f1b", one, 4 * one).bubble_fraction() for one in i.p],
    "distributed-29": with_named_inputs(_grid),
    "llm-training-35": lambda i: _built("gpipe", i.p, 1).num_messages() // 2,
    "llm-training-36": lambda i: _built("gpipe", i.N, i.M).bubble_fraction(),
    "llm-training-37": lambda i: {
        "gpipe_M32": _built("gpipe", i.N, i.N * i.k).bubble_fraction(),
        "1f1b_M8": _built("1f1b", i.N, i.N).bubble_fraction(),
        "1f1b_M32": _built("1f1b", i.N, i.N * i.k).bubble_fraction(),
    },
    "llm-training-38": lambda i: (
        max(_in_flight("1f1b", i.N, i.N * i.k)) / max(_in_flight("gpipe", i.N, i.N * i.k))
    ),
    "llm-training-39": with_named_inputs(_ratios),
    "llm-training-40": with_named_inputs(_totals),
    "between-01": with_named_inputs(_both_definitions),
}
"""By the id of the claim."""
