# SPDX-License-Identifier: Apache-2.0
"""The seconds of the work that a rehearsal has counted, kernel by kernel, and what binds a step.

Each kernel takes what `cost/seconds/kernels.py` says, and a task no less than its host takes to
launch its kernels; what is sent takes what the plan's own prediction says shows of it, without its
pace. That is a step in which nothing is lost between kernels: beside it stands the prediction,
whose pace, stragglers and fixed seconds are those of runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import ceil_div, first_number
from echelon.cost.seconds.data import offload_seconds
from echelon.cost.seconds.from_plan import peak_flops
from echelon.cost.seconds.kernels import kernel_seconds
from echelon.cost.seconds.step import fullest_rank_weights
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.rehearsal.rank import RankRehearsal
from echelon.rehearsal.work import KernelWork, Work

UPDATES = "_fused_"
"""How the kernels of optimizers begin."""
LAUNCHES, COMMUNICATION, PIPELINE = "launches", "communication", "pipeline"
BINDS = ("matmul", "attention", "memory", LAUNCHES, COMMUNICATION, PIPELINE)
"""What the seconds of a step go to."""
_SENT = ("tensor", "context", "expert", "gather", "gradients", "messages")
_COMPUTED = ("matmul", "attention", "memory", "host", "head", "recompute")
"""Terms of a prediction."""
DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}
"""The dtype of products by the bytes of an element."""
OUTSIDE = ""
"""The task of what is done once a step, whatever microbatches there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeconds:
    """Say what the kernels of one name take in a step, and what binds most of it."""

    name: str
    times: int
    seconds: float
    bytes: int
    flops: int
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Hold the seconds of a step of counted work beside those that the planner predicts."""

    device: str
    """The device whose rates were taken."""
    rank: int
    """The rank whose kernels take longest."""
    seconds: Mapping[str, float]
    """The seconds of a step by what binds, in the order of BINDS."""
    kernels: tuple[KernelSeconds, ...]
    """Kernels by name, those with most seconds first."""
    mfu: float
    """The share of the devices' peak that the model's own FLOPs are."""
    planned_s: float
    """Seconds of a step that the planner predicts."""
    planned_mfu: float
    """The share of the peak that it predicts."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def binds(self) -> str:
        """Return what most of a step goes to."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def planned_ratio(self) -> float:
        """Return how many times as long the planner predicts a step to take."""
        return self.planned_s / self.step_s

    def share(self, name: str) -> float:
        """Return the share of a step that goes to something."""
        return self.seconds[name] / self.step_s

    def to_json(self) -> dict[str, object]:
        """Return the roofline as a JSON object."""
        return {
            "device": self.device,
            "rank": self.rank,
            "step_s": self.step_s,
            "mfu": self.mfu,
            "binds": self.binds,
            "share": {name: self.share(name) for name in self.seconds},
            "planned_step_s": self.planned_s,
            "planned_mfu": self.planned_mfu,
            "planned_over_roofline": self.planned_ratio,
            "kernels": [asdict(one) for one in self.kernels],
        }


def roofline_of_plan(plan: Plan, rehearsed: Plan, ranks: Sequence[RankRehearsal]) -> Roofline:
    """Return the roofline of a step of `plan`, of which `rehearsed` has a few microbatches."""
    estimate = estimate_plan(plan)
    more = plan.num_microbatches / rehearsed.num_microbatches
    parts = {
        one.rank: _RankSeconds(plan, estimate.inputs, one.work, more)
        for one in sorted(ranks, key=lambda each: each.rank)
    }
    rank = max(parts, key=lambda one: parts[one].total)
    seconds = dict.fromkeys(BINDS, 0.0) | parts[rank].by_bound
    seconds[COMMUNICATION] = _communication(estimate)
    computed = sum(estimate.seconds[name] for name in _COMPUTED)
    # Ranks wait for each other as long as their work is.
    seconds[PIPELINE] = estimate.seconds["bubble"] * parts[rank].total / computed
    step_s = sum(seconds.values())
    peak = estimate.devices * estimate.peak_flops
    return Roofline(
        device=plan.cluster.device.name,
        rank=rank,
        seconds=seconds,
        kernels=parts[rank].kernels(),
        mfu=estimate.model_flops / (step_s * peak),
        planned_s=estimate.step_s,
        planned_mfu=estimate.mfu,
    )


def _communication(estimate: Estimate) -> float:
    """Return what shows of what is sent in a step, to other ranks and to the host."""
    work = estimate.inputs
    shown = sum(estimate.seconds[name] for name in _SENT) / first_number(work.software.pace)
    here = ceil_div(work.model.layers, work.layout.pp)
    mixtures = min(first_number(work.model.mixture_layers), first_number(here))
    held = fullest_rank_weights(work, first_number(here) - mixtures, mixtures)
    layout = work.layout
    cut = first_number(layout.zero) >= 1.0
    shared = (held.blocks + held.ends) / (layout.shard if cut else 1.0)
    routed = held.routed / (layout.expert_shard if cut else 1.0)
    return shown + first_number(offload_seconds(work, shared + routed))


class _RankSeconds:
    """Add up the seconds of what a rank does in a step."""

    def __init__(
        self, plan: Plan, work: CostInputs, tasks: Mapping[str, Work], more: float
    ) -> None:
        self._work, self._tasks, self._more = work, tasks, more
        # Products may be of other elements than parameters are.
        own = DTYPE_BYTES[plan.mathematics.precision.parameters]
        self._works = {
            element: replace(
                work, machine=replace(work.machine, peak_flops=peak_flops(plan.cluster, dtype))
            )
            for element, dtype in DTYPES.items()
            if element != own
        }
        self.by_bound: dict[str, float] = defaultdict(float)
        for task, done in tasks.items():
            device = 0.0
            for seconds, binds, _, times in self._each(task, done):
                self.by_bound[binds] += seconds * times
                device += seconds * times
            host = self._times(task) * done.kernels * first_number(work.software.host_s)
            self.by_bound[LAUNCHES] += max(0.0, host - device)

    @property
    def total(self) -> float:
        """Return the seconds of all kernels, and of launches that hold them up."""
        return sum(self.by_bound.values())

    def kernels(self) -> tuple[KernelSeconds, ...]:
        """Return the kernels by name, those with most seconds first."""
        found: dict[str, list[tuple[float, str, KernelWork, float]]] = {}
        for task, done in self._tasks.items():
            for row in self._each(task, done):
                found.setdefault(row[2].name, []).append(row)
        rows = [_kernels_of_name(name, each) for name, each in found.items()]
        return tuple(sorted(rows, key=lambda one: -one.seconds))

    def _times(self, task: str) -> float:
        return 1.0 if task == OUTSIDE else self._more

    def _each(self, task: str, done: Work) -> Iterator[tuple[float, str, KernelWork, float]]:
        """Yield the seconds of one kernel, what binds it, the kernel, and how often it runs."""
        for one, count in done.each.items():
            attention = None
            if one.keys:
                attention = (one.flops * one.done, one.keys, "backward" in one.name)
            element = one.product.element if one.product else 0
            seconds, binds = kernel_seconds(
                self._works.get(element, self._work),
                one.num_bytes,
                product=one.product,
                attention=attention,
                update=one.name.startswith(UPDATES),
            )
            yield seconds, binds, one, count * self._times(task)


def _kernels_of_name(
    name: str, rows: Sequence[tuple[float, str, KernelWork, float]]
) -> KernelSeconds:
    bound: dict[str, float] = defaultdict(float)
    for seconds, binds, _, times in rows:
        bound[binds] += seconds * times
    return KernelSeconds(
        name=name,
        times=round(sum(times for *_, times in rows)),
        seconds=sum(bound.values()),
        bytes=round(sum(one.num_bytes * times for _, _, one, times in rows)),
        flops=round(sum(one.flops * one.done * times for _, _, one, times in rows)),
        binds=max(bound, key=lambda name: bound[name]),
    )
