# SPDX-License-Identifier: Apache-2.0
"""What the controls of the explorer choose among, as numbers: models, clusters, kinds.

Models and clusters are presets. What our trainer is on a cluster, and what its devices reach of
their peaks, is asked of `cost/` for each model and is in lists in which each record stands once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echelon.config.cluster.settings import read_typed_cluster
from echelon.config.load import load_job
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.cluster import Cluster, fast_domain
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.seconds.from_plan import machine_numbers_from_plan, peak_flops
from echelon.cost.seconds.kernels import multiplied_weights
from echelon.cost.seconds.trainers import our_constants
from echelon.handbook.guides.situation import largest_block
from echelon.page.explorer.controls import OPERATORS, PRECISIONS
from echelon.schedule.build import SCHEDULES

MOST_VIRTUAL = 16  # stages of a rank
CONTEXT_DEGREES = tuple(2**power for power in range(7))
LENGTHS = tuple(2**power for power in range(8, 21))
"""Degrees of cp, and tokens of a sequence: of each kind each rank gets an equal part."""
RECOMPUTES = ("none", "selective", "full")
PROCESSORS = "laptop"
GPUS = "8xh100"
"""Clusters on which a model is looked at once: what differs between others is no kernel of ours."""


@dataclass(slots=True)
class Table:
    """Hold records, each of which stands once."""

    rows: list[Any] = field(default_factory=list[Any])
    places: dict[str, int] = field(default_factory=dict[str, int])

    def place(self, record: Any) -> int:
        """Return where a record stands."""
        key = repr(record)
        if key not in self.places:
            self.places[key] = len(self.rows)
            self.rows.append(record)
        return self.places[key]


@dataclass(slots=True)
class Tables:
    """Hold what devices reach, from which ranks on, and what our trainer is on them."""

    machines: Table = field(default_factory=Table)
    machine_rows: Table = field(default_factory=Table)
    software: Table = field(default_factory=Table)


def explorer_tables(models: Sequence[str], clusters: Sequence[str]) -> dict[str, Any]:
    """Return the tables of the page; ConfigError where a model or a cluster is not known."""
    tables = Tables()
    plans = {name: _plans(name) for name in models}
    found = [read_typed_cluster(name, "--cluster") for name in clusters]
    return {
        "models": [_model(name, plans[name][PROCESSORS]) for name in models],
        "clusters": [_cluster(cluster, plans, tables) for cluster in found],
        "machines": tables.machines.rows,
        "machine_rows": tables.machine_rows.rows,
        "software": tables.software.rows,
        "schedules": {name: schedule_index(name) for name in SCHEDULES},
        "context_kinds": {
            name: {
                "exchange": kind.exchange,
                "gathers_keys": kind.gathers_keys,
            }
            for name, kind in CONTEXT_KINDS.items()
        },
        "recomputes": list(RECOMPUTES),
        "operators": list(OPERATORS),
        "precisions": list(PRECISIONS),
        "optimizers": list(OPTIMIZERS),
        "context_degrees": list(CONTEXT_DEGREES),
        "lengths": list(LENGTHS),
    }


def _plans(name: str) -> dict[str, Plan]:
    """Return a run of a model on one device, of processors and of GPUs, whatever it reads."""
    batch = ("batch.global_sequences=1", "batch.sequence_length=64", "batch.microbatch_sequences=1")
    return {
        cluster: load_job(name, (*batch, f'cluster.preset="{cluster}"')).plan
        for cluster in (PROCESSORS, GPUS)
    }


def _model(name: str, plan: Plan) -> dict[str, Any]:
    return {
        "name": name,
        "shape": asdict(plan.model),
        "multiplied": multiplied_weights(plan.model),
        "parameters": num_parameters(plan.model),
        "largest_block": largest_block(plan.model),
    }


def _cluster(cluster: Cluster, plans: dict[str, dict[str, Plan]], tables: Tables) -> dict[str, Any]:
    gpus = cluster.backend == "nccl"
    runs = {
        name: replace(each[GPUS if gpus else PROCESSORS], cluster=cluster)
        for name, each in plans.items()
    }
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "gpus": gpus,
        "devices": cluster.num_devices,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "fast_domain": fast_domain(cluster),
        "memory_bytes": float(cluster.device.memory_bytes),
        "peaks": [list(peak) for peak in cluster.device.peak_flops],
        "peak_flops": {
            name: peak_flops(cluster, precision.parameters)
            for name, precision in PRECISIONS.items()
        },
        "links": [
            {
                **asdict(link),
                "words": f"{decimal_bytes(link.bandwidth)}/s each way",
            }
            for link in cluster.links
        ],
        "software": {
            name: tables.software.place(asdict(our_constants(cluster, plan.layout.kernels)))
            for name, plan in runs.items()
        },
        "machines": {precision: _machines(runs, precision, tables) for precision in PRECISIONS},
    }


def _machines(runs: dict[str, Plan], precision: str, tables: Tables) -> dict[str, int]:
    """Return where the rows of each model are.

    Of a model the rates of a device follow heads and masks alone: which kernel attends.
    """
    known: dict[object, int] = {}
    found: dict[str, int] = {}
    for name, plan in runs.items():
        model = plan.model
        key = (model.head_dim, model.soft_cap, model.window, model.max_positions)
        if key not in known:
            rows = [*_machine_rows(plan, precision, tables.machines)]
            known[key] = tables.machine_rows.place(rows)
        found[name] = known[key]
    return found


def _machine_rows(plan: Plan, precision: str, machines: Table) -> Iterator[dict[str, Any]]:
    """Yield where the rates of a device are, from so many ranks on."""
    cluster, model, gpus = plan.cluster, plan.model, plan.cluster.backend == "nccl"
    mathematics = replace(plan.mathematics, precision=PRECISIONS[precision])
    plan = replace(plan, mathematics=mathematics)
    lengths = {False: 1, True: model.max_positions}
    last: dict[bool, int] = {}
    for ranks in range(1, (2 if gpus else max(2, cluster.devices_per_node)) + 1):
        if ranks > cluster.num_devices:
            break
        for hidden, length in lengths.items():
            if hidden and not _hides(model):
                continue
            run = _with_ranks(plan, ranks, max(length, 2 * (model.window or 0) if hidden else 1))
            place = machines.place(asdict(machine_numbers_from_plan(run, measured=gpus)))
            if last.get(hidden) != place:
                last[hidden] = place
                yield {"ranks": ranks, "hidden": hidden, "place": place}


def _hides(model: ModelShape) -> bool:
    return model.window is not None and model.window < model.max_positions


def _with_ranks(plan: Plan, ranks: int, length: int) -> Plan:
    layout = replace(plan.layout, mesh=Mesh(dp_replicate=ranks))
    mathematics = replace(plan.mathematics, global_sequences=ranks, sequence_length=length)
    return replace(plan, layout=layout, mathematics=mathematics)
