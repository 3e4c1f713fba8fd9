"""The plans whose steps are measured: drawn at random from all legal ones, and the planner's own.

A draw takes a world size, degrees that multiply to it, and for each choice that they leave open one
value, all equally likely; `config/` then checks it as it would check a run, and what a rule refuses
is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.cost.fit.runs import first_devices, plan_label
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import search

MODEL: Mapping[str, object] = {
    "model.layers": 8,
    "model.hidden": 256,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn": 704,
    "model.vocab": 2048,
    "model.tied": False,
    "batch.sequence_length": 192,
    "batch.global_sequences": 8,
}
"""A decoder of 8 million parameters, and a batch of which a step takes about a second here."""
WORLDS = (1, 2, 2, 3, 4, 4, 4, 4)
"""Ranks of a draw: most plans are there for four."""
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1")
MOST_DRAWS = 20_000
Settings = dict[str, object]


def drawn_plans(cluster: Cluster, count: int, seed: int) -> list[Plan]:
    """Return `count` distinct random plans of 1 to as many ranks as `cluster` has devices."""
    generator = random.Random(seed)
    requests: dict[int, SearchRequest] = {}
    found: dict[str, Plan] = {}
    for _ in range(MOST_DRAWS):
        if len(found) == count:
            return list(found.values())
        world = generator.choice([n for n in WORLDS if n <= cluster.num_devices])
        if world not in requests:
            requests[world] = request_of(cluster, world)
        try:
            plan = requests[world].job(_settings(world, generator)).plan
        except ConfigError:
            continue
        plan = replace(plan, cluster=requests[world].cluster)
        found.setdefault(plan_label(plan), plan)
    raise ValueError(f"{count} plans wanted, {len(found)} found in {MOST_DRAWS} draws")


def planned(cluster: Cluster, world: int, top: int) -> list[Plan]:
    """Return the plans of `world` ranks that the planner ranks first."""
    request = replace(request_of(cluster, world), top=top)
    ranked = search(request).ranked
    return [replace(one.plan, cluster=request.cluster) for one in ranked if one.plan is not None]


def request_of(cluster: Cluster, world: int) -> SearchRequest:
    """Return what is asked of the planner: the model on the first `world` devices of a cluster."""
    settings = [f"{key}={_toml(value)}" for key, value in MODEL.items()]
    request = make_request("nano", cluster=f"{world}xcpu", settings=settings)
    some = first_devices(cluster, world)
    return replace(request, cluster=some, one_rank_run=replace(request.one_rank_run, cluster=some))


def _settings(world: int, generator: random.Random) -> Settings:
    """Return one draw of the settings of a layout."""
    pick = generator.choice
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    degrees = dict.fromkeys(axes, 1)
    left = world
    while left > 1:
        factor = 2 if left % 2 == 0 else left
        degrees[pick(axes)] *= factor
        left //= factor
    found: Settings = {f"mesh.{axis}": degree for axis, degree in degrees.items()}
    found["batch.microbatch_sequences"] = pick((1, 2, 4, 8))
    if degrees["tp"] > 1:
        found["mesh.sequence_parallel"] = pick((True, False))
    if degrees["cp"] > 1:
        found["context.kind"] = pick(("ring", "striped", "gathered", "ulysses"))
    if degrees["pp"] > 1:
        found["pipeline.schedule"] = schedule = pick(SCHEDULES)
        if schedule == "interleaved-1f1b":
            found["pipeline.virtual_stages"] = 2
    if degrees["dp_shard"] * degrees["cp"] > 1:
        found["zero.stage"] = stage = pick((0, 1, 2, 3))
        if stage == 3:
            found["zero.reshard_after_forward"] = pick(("always", "never"))
    every = pick((0, 0, 1, 2))
    if every:
        found |= {"recompute.policy": "full", "recompute.every": every}
    return found


def _toml(value: object) -> str:
    return str(value).lower()
