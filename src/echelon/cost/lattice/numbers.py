"""What the formulas of a lattice read: a model, a machine, and the split of a run, as numbers.

Each field is a number, or an array where plans of one call differ in it. Flags are 0.0 or 1.0, so
that they can be multiplied by. Sizes are counts, seconds are `*_s`, bandwidths bytes per second in
one direction and per device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Num: TypeAlias = "float | Array"
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """Give the sizes of a decoder and its batch.

    `query_dim` and `kv_dim` are the widths of all query heads and of all key (or value) heads,
    `attention_dim` the mean width at which queries meet keys and weights meet values. `up` is 2 for
    a gated MLP, else 1. `head_norms` are the weights of norms of queries and keys. Of latent
    attention `query_rank` and `kv_rank` (with the `rope_dim` of rotary keys) are what it leads down
    to, else 0, and `kv_up_dim` the width it leads back up to. With `experts` 0
    the model is dense; the first `dense_layers` blocks of a mixture are. `reach` is the mean number
    of keys that a query meets under the mask.
    """

    layers: Num
    hidden: Num
    heads: Num
    query_dim: Num
    kv_dim: Num
    attention_dim: Num
    ffn: Num
    up: Num
    vocab: Num
    tied: Num
    positions: Num
    length: Num
    reach: Num
    norm_weights: Num = 1.0
    qkv_bias: Num = 0.0
    output_bias: Num = 0.0
    mlp_bias: Num = 0.0
    head_norms: Num = 0.0
    query_rank: Num = 0.0
    kv_rank: Num = 0.0
    rope_dim: Num = 0.0
    kv_up_dim: Num = 0.0
    value_dim: Num = 0.0
    experts: Num = 0.0
    top_k: Num = 0.0
    expert_ffn: Num = 0.0
    shared_experts: Num = 0.0
    dense_layers: Num = 0.0

    @property
    def mixture_layers(self) -> Num:
        """Return the number of blocks that are mixtures of experts."""
        return np.where(np.asarray(self.experts) > 0, self.layers - self.dense_layers, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNumbers:
    """Give one tier of links: devices that it joins, bandwidth, latency, and what is reached."""

    degree: Num
    bandwidth: Num
    latency_s: Num
    efficiency: Num
    half_bytes: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNumbers:
    """Give a device and its links, fastest first.

    `peak_flops` is of products of weights, `attention_flops` of attention: they differ where
    products are done in fp8. Where ranks share cores, rates are those of a rank while all of them
    are at work, `share` the part of a core that it then has.
    """

    peak_flops: Num
    attention_flops: Num
    memory_bytes: Num
    memory_bandwidth: Num
    matmul: Num
    half_depth: Num
    tile: Num
    units: Num
    memory: Num
    attention: Num
    attention_backward: Num
    optimizer: Num
    aligned: Num
    node: Num
    tiers: tuple[TierNumbers, ...]
    share: Num = 1.0
    launch_s: Num = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNumbers:
    """Give the split of a run.

    `microbatches` are those of one data-parallel rank in a step, of `microbatch` sequences each.
    `dp_shard` x `dp_replicate` is the data-parallel degree; ZeRO cuts over dp_shard x cp. `ulysses`
    is the part of `cp` that exchanges heads, `gathered` whether the rest gathers keys (else a
    ring). `recompute` is the share of blocks that run forward again, `selective` whether only their
    attention does. `virtual` stages are on each pipeline rank; `schedule` is the index of a
    schedule in `lattice.pipeline.SCHEDULES`. `expert_tp` cuts experts as `tp` cuts dense MLPs.
    """

    tp: Num = 1.0
    cp: Num = 1.0
    pp: Num = 1.0
    dp_shard: Num = 1.0
    dp_replicate: Num = 1.0
    ep: Num = 1.0
    expert_tp: Num = 1.0
    sequence_parallel: Num = 0.0
    ulysses: Num = 1.0
    gathered: Num = 0.0
    microbatch: Num = 1.0
    microbatches: Num = 1.0
    virtual: Num = 1.0
    schedule: Num = 0.0
    zero: Num = 0.0
    reshard: Num = 1.0
    recompute: Num = 0.0
    selective: Num = 0.0
    offload: Num = 0.0

    @property
    def dp(self) -> Num:
        """Return the data-parallel degree."""
        return self.dp_shard * self.dp_replicate

    @property
    def devices(self) -> Num:
        """Return the number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shard(self) -> Num:
        """Return over how many ranks ZeRO cuts what is not of experts."""
        return self.dp_shard * self.cp


def take(record: Record, index: Any) -> Record:
    """Return `record` with every array in it replaced by its entries at `index`."""
    changed: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        value = getattr(record, item.name)
        if isinstance(value, np.ndarray):
            changed[item.name] = value[index]
        elif isinstance(value, tuple):
            parts = cast("tuple[object, ...]", value)
            changed[item.name] = tuple(take(part, index) for part in parts)
    return replace(record, **changed)  # type: ignore[type-var]


def ceil_div(value: Num, by: Num) -> Num:
    """Return `value` / `by`, rounded up."""
    return -(-value // by)
