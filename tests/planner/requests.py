"""Small searches for tests, and a search that leaves nothing out to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from echelon.core.axis import SHARD_AXES
from echelon.core.mesh import Mesh
from echelon.cost.inputs.pipeline import schedule_index
from echelon.layout.data_groups import ranks_per_node
from echelon.planner.search.formulas import VectorizedFormulas, broadcast_to_array
from echelon.planner.search.legal_meshes import Legality, expert_fold_degrees, legal_meshes
from echelon.planner.search.options import (
    MOST_VIRTUAL,
    RecomputeOption,
    ScheduleOption,
    ZeroOption,
    recompute_options,
    zero_options,
)
from echelon.planner.search.request import Objective, SearchAim, SearchRequest, make_request
from echelon.schedule.build import SCHEDULES

SMALL = (
    "model.layers=6",
    "model.hidden=1024",
    "model.heads=8",
    "model.kv_heads=4",
    "model.ffn=4096",
    "model.vocab=32000",
    "model.max_positions=1024",
    "batch.sequence_length=1024",
    "batch.global_sequences=24",
)
LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
MIXTURE = (*SMALL, "model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=512")


def small(
    *,
    devices: int = 8,
    memory_gb: float = 80.0,
    pins: Sequence[str] = (),
    settings: Sequence[str] = SMALL,
    objective: Objective = "time",
) -> SearchRequest:
    """Return a request for a small model on so many devices with so much memory each."""
    request = make_request(
        "nano",
        cluster=f"{devices}xh100",
        settings=settings,
        pins=pins,
        aim=SearchAim(objective=objective),
    )
    device = replace(request.cluster.device, memory_bytes=int(memory_gb * 1e9))
    return replace(request, cluster=replace(request.cluster, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    """Hold the best of each row, schedule and virtual stages, and how many plans there are."""

    best: dict[tuple[int, str, int], float]
    num_plans: int
    num_fitting: int

    def values(self, keep: int) -> list[float]:
        """Return the values of the best, in order."""
        return sorted(self.best.values())[:keep]


def exhaustive(request: SearchRequest, world: int) -> Exhaustive:
    """Compute every legal plan of a world size; no bound, no dominance."""
    rows = legal_meshes(request, world, Legality(request.one_rank_run))
    formulas = VectorizedFormulas(request, rows)
    formulas.prepare(np.arange(len(rows), dtype=np.int64))
    made = [one for row in range(len(rows)) for one in _plans_of(request, rows.columns, row)]
    row, shares, orders, again = zip(*made, strict=True)
    index = np.array(row, dtype=np.int64)
    numbers = {
        name: np.array([getattr(one, name) for one in shares], dtype=float)
        for name in ("zero", "dp_replicate", "dp_shard", "reshard", "offload", "secondary")
    }
    numbers["schedule"] = np.array([schedule_index(one.name) for one in orders])
    numbers["virtual"] = np.array([one.virtual for one in orders], dtype=float)
    for name in again[0].numbers:
        numbers[name] = np.array([one.numbers[name] for one in again])
    held = broadcast_to_array(formulas.bytes(index, None, **numbers).total, len(index))
    seconds = broadcast_to_array(formulas.seconds(index, **numbers).total, len(index))
    fits = held <= request.memory_bytes
    best: dict[tuple[int, str, int], float] = {}
    for place in np.flatnonzero(fits):
        key = int(index[place]), orders[place].name, orders[place].virtual
        best[key] = min(best.get(key, np.inf), float(seconds[place]))
    return Exhaustive(best=best, num_plans=len(made), num_fitting=int(fits.sum()))


def _plans_of(
    request: SearchRequest, columns: dict[str, np.ndarray], row: int
) -> Iterator[tuple[int, ZeroOption, ScheduleOption, RecomputeOption]]:
    one = {name: int(column[row]) for name, column in columns.items()}
    here = {name: column[row : row + 1] for name, column in columns.items()}
    inner = int(expert_fold_degrees(here, np.ones(1, dtype=np.int64))[0])
    layers = request.model.layers
    shares = [
        share
        for share in zero_options(one["dp"], one["cp"], one["ep"], inner, offload=False)
        if share.reshard
    ]
    shares += [
        replace(share, secondary=1)
        for share in shares
        if share.zero == 3 and _keeps_secondary_slices(request, one, share)
    ]
    orders = [
        ScheduleOption(name, virtual, 1, 1)
        for name, virtual in product(SCHEDULES, range(1, MOST_VIRTUAL + 1))
        if name != "dualpipe"
        and SCHEDULES[name].fits_stages(virtual * one["pp"], one["pp"])
        and SCHEDULES[name].allows_microbatches(one["pp"], one["microbatches"])
        and virtual * one["pp"] <= layers
        and (one["pp"] > 1 or name == "1f1b")
    ]
    for share, order in product(shares, orders):
        for again in recompute_options(request):
            yield row, share, order, again


def _keeps_secondary_slices(request: SearchRequest, row: dict[str, int], share: ZeroOption) -> bool:
    """Return whether the nodes of a mesh have something to keep, by the ranks of its groups."""
    mesh = Mesh(
        pp=row["pp"],
        dp_replicate=share.dp_replicate,
        dp_shard=share.dp_shard,
        cp=row["cp"],
        tp=row["tp"],
        ep=row["ep"],
    )
    groups = [mesh.groups(*SHARD_AXES)]
    if request.model.experts is not None:
        groups.append(mesh.expert_shard_groups(expert_tp=row["expert_tp"]))
    return any(ranks_per_node(one, request.cluster.devices_per_node) > 1 for one in groups)
