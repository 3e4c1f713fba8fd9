# SPDX-License-Identifier: Apache-2.0
"""Facts behind claims about pipelines and all else, and the computed value of every claim."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from echelon.config.load import load_job
from echelon.core.attention_mask import AttentionMask
from echelon.core.axis import DATA_AXES
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec, parameters
from echelon.cost.bytes.model_sizes import achieved_flops
from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.handbook.errata.claims import Formula, PublishedClaim, with_named_inputs
from echelon.handbook.errata.memory import MEMORY, VOLUME
from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.builders.builder import Builder
from echelon.schedule.check import peak_in_flight_per_stage
from echelon.schedule.simulate import Durations, Simulation, simulate

BITS = 8  # of a byte


def _column(H_out: int, N: int, H_in: int = 1) -> list[int]:
    """Return the shape [in, out] of a column-parallel weight on one of N ranks."""
    spec = ParameterSpec(name="up", shape=(H_out, H_in), layer=0, split_dim=0)
    return list(reversed(spec.local_shape(N)))


def _world(dp: int, tp: int, pp: int) -> int:
    return Mesh(dp_replicate=dp, tp=tp, pp=pp).world_size


def _data_groups(dp: int, tp: int, pp: int) -> dict[str, int]:
    groups = Mesh(dp_replicate=dp, tp=tp, pp=pp).groups(*DATA_AXES)
    return {"groups": len(groups), "ranks_of_each": len(groups[0])}


def _places(dp: int, pp: int, tp: int) -> dict[str, str]:
    """Return where ranks lie if data ranks are outermost and tensor ranks innermost."""
    found: dict[str, str] = {}
    for rank in (4, 8, dp * pp * tp - 1):
        outer, inner = divmod(rank, pp * tp)
        found[f"GPU{rank}"] = f"dp{outer} tp{inner % tp} pp{inner // tp}"
    return found


def _published(pp: int, dp: int, ep: int, node: int) -> dict[str, int]:
    mesh = Mesh(pp=pp, dp_shard=dp, ep=ep)
    nodes = {rank // node for rank in mesh.expert_groups()[0]}
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "ep": mesh.ep,
        "ranks": mesh.world_size,
        "nodes_of_an_expert_group": len(nodes),
    }


def _stage_shares(vocab: int, d: int, dff: int, L: int) -> list[float]:
    """Return the share of all weights that each of four stages has; the ends hold the tables."""
    shape = ModelShape(
        name="claim",
        layers=L,
        hidden=d,
        heads=d // 128,
        kv_heads=d // 128,
        head_dim=128,
        ffn=dff,
        vocab=vocab,
        max_positions=4096,
    )
    specs, stages = parameters(shape), 4
    held = [0] * stages
    for index, spec in enumerate(specs):
        at_end = stages - 1 if index >= len(specs) // 2 else 0
        held[at_end if spec.layer is None else spec.layer * stages // L] += spec.numel
    return [count / sum(held) for count in held]


def _cluster(name: str) -> Cluster:
    return load_job("nano", (f"cluster.preset={name}",)).plan.cluster


def _links(clusters: Sequence[str]) -> dict[str, float]:
    """Return what links inside of nodes carry, in GB/s: one way, and both together."""
    a100, h100, b200 = (_cluster(name).links[0].bandwidth / 1e9 for name in clusters)
    return {
        "A100_total_bidir": 2 * a100,
        "A100_per_direction": a100,
        "H100_total": 2 * h100,
        "B200_total": 2 * b200,
    }


def _gradient_seconds(psi: float, shards: int, dp: int, GBps: Sequence[float]) -> list[float]:
    sent = all_reduce_bytes(int(2 * psi / shards), dp)
    return [sent / (rate * 1e9) for rate in GBps]


def _means(n: Sequence[int], g: Sequence[float]) -> dict[str, float]:
    weighted = sum(count * value for count, value in zip(n, g, strict=True)) / sum(n)
    return {"mean_of_means": sum(g) / len(g), "true_mean": weighted}


def _rates(t: Sequence[float]) -> dict[str, float]:
    return {
        "async_updates_per_s": sum(1 / one for one in t),
        "sync_global_steps_per_s": 1 / max(t),
        "sync_updates_per_s": len(t) / max(t),
    }


def _coverage(N: int) -> dict[str, Any]:
    """Return the blocks of queries and keys that meet, with and without a causal mask."""
    causal = AttentionMask(causal=True, window=None).num_pairs(N)
    before = [AttentionMask(causal=True, window=None).num_pairs(n) for n in range(N + 1)]
    return {
        "full": AttentionMask(causal=False, window=None).num_pairs(N),
        "causal": causal,
        "causal_work_per_rank": [before[n + 1] - before[n] for n in range(N)],
    }


def _experts_a_token() -> dict[str, int]:
    tops = [load_job(name).plan.model.experts for name in ("mixtral-8x7b", "deepseek-v3")]
    mixtral, deepseek = (one.top_k if one else 0 for one in tops)
    return {"Switch": 1, "Mixtral": mixtral, "DeepSeek-V3": deepseek}


OTHERS: Mapping[str, Formula] = {
    "distributed-01": lambda i: i.B / Mesh(dp_replicate=i.N).dp,
    "distributed-02": lambda i: _column(i.H_out, i.N, i.H_in),
    "distributed-04": lambda i: i.L // Mesh(pp=i.P).pp,
    "distributed-06": with_named_inputs(_links),
    "distributed-07": lambda i: [rate / BITS for rate in i.Gbps],
    "distributed-08": lambda i: i.Gbps / BITS,
    "distributed-10": lambda i: _column(i.H_out, i.N)[1],
    "distributed-27": with_named_inputs(_world),
    "distributed-28": with_named_inputs(_world),
    "distributed-30": lambda i: i.world // Mesh(tp=i.tp, pp=i.pp, cp=i.cp).world_size,
    "distributed-43": lambda i: {"vs_tf32": i.bf16 / i.tf32, "vs_fp32": i.bf16 / i.fp32},
    "distributed-45": with_named_inputs(_world),
    "distributed-48": lambda i: [inside / between for inside, between in i.one_way_GBps],
    "distributed-51": with_named_inputs(_gradient_seconds),
    "distributed-54": with_named_inputs(_data_groups),
    "distributed-56": lambda i: float(max(i.t)),
    "llm-training-03": lambda i: achieved_flops(i.n, i.peak, i.mfu) / 1e15,
    "llm-training-18": lambda _: array("d").itemsize * BITS,
    "llm-training-31": lambda i: i.Gbps / BITS,
    "llm-training-32": lambda i: i.heads // Mesh(tp=i.tp).tp,
    "llm-training-34": with_named_inputs(_stage_shares),
    "llm-training-45": lambda i: _coverage(i.N)["full"] - i.N,
    "llm-training-46": lambda i: i.N - 1,
    "llm-training-48": with_named_inputs(_coverage),
    "llm-training-49": with_named_inputs(_experts_a_token),
    "llm-training-60": with_named_inputs(_world),
    "llm-training-61": with_named_inputs(_places),
    "llm-training-63": with_named_inputs(_world),
    "llm-training-69": with_named_inputs(_published),
    "scaling-02": lambda i: i.nvlink / i.pcie,
    "scaling-06": lambda i: ceil(i.n / i.N) * i.N - i.n,
    "scaling-08": with_named_inputs(_means),
    "scaling-15": with_named_inputs(_rates),
    "scaling-18": lambda i: i.per * i.n,
}
"""By the id of the claim."""


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


COMPUTED: Mapping[str, Formula] = MappingProxyType({**MEMORY, **VOLUME, **BUBBLE, **OTHERS})
"""For each claim that is a number: the function of its inputs that gives what holds."""


def computed_value(claim: PublishedClaim) -> object | None:
    """Return what holds of a claim by our formulas; None where it is told, not computed."""
    function = COMPUTED.get(claim.id)
    return None if function is None else function(SimpleNamespace(**claim.inputs))


def agrees_to_given_digits(ours: Any, holds: Any) -> bool:
    """Return whether a computed value is the stated one, to the digits to which that is given."""
    if isinstance(holds, Mapping):
        entries = cast("Mapping[str, Any]", holds)
        if not isinstance(ours, Mapping):
            return False
        return set(cast("Mapping[str, Any]", ours)) == set(entries) and all(
            agrees_to_given_digits(ours[k], v) for k, v in entries.items()
        )
    if isinstance(holds, Sequence) and not isinstance(holds, str):
        values = cast("Sequence[Any]", holds)
        if not isinstance(ours, Sequence):
            return False
        found = cast("Sequence[Any]", ours)
        return len(found) == len(values) and all(map(agrees_to_given_digits, found, values))
    if isinstance(holds, str) or not isinstance(ours, int | float):
        return ours == holds
    digits = len(f"{holds!r}".partition(".")[2]) if isinstance(holds, float) else 0
    return abs(ours - holds) <= 0.5001 * 10.0**-digits * (isinstance(holds, float) or 0)
