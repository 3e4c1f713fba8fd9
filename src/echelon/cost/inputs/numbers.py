# SPDX-License-Identifier: Apache-2.0
"""What the formulas read: a model, a machine, and the split of a run, as numbers.

Each field is a number, or an array where plans of one call differ in it. Flags are 0.0 or 1.0, so
that they can be multiplied by. Sizes are counts, seconds are `*_s`, bandwidths bytes per second in
one direction and per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.cluster import PCIE_4_BYTES_PER_S

Array: TypeAlias = NDArray[np.float64]
Num: TypeAlias = "float | Array"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """Give the sizes of a decoder and its batch; each a number, or an array [plans]."""

    layers: Num
    """Blocks."""
    hidden: Num
    """Width of the residual stream."""
    heads: Num
    """Query heads."""
    query_dim: Num
    """Width of all query heads."""
    kv_dim: Num
    """Width of all key heads (the same for values)."""
    attention_dim: Num
    """Mean width at which queries meet keys, and weights meet values."""
    ffn: Num
    """Inner width of a dense MLP."""
    up: Num
    """2 for a gated MLP, else 1."""
    vocab: Num
    """Token ids."""
    tied: Num
    """Flag: the head is the embedding."""
    positions: Num
    """Rows of a learned table of positions; 0 without one."""
    length: Num
    """Tokens of a sequence."""
    keys_per_query: Num
    """Mean number of keys that a query meets under the mask."""
    norm_weights: Num = 1.0
    """Weight vectors of a norm: 1, or 2 with a bias."""
    qkv_bias: Num = 0.0
    """Flag: queries, keys and values have a bias."""
    output_bias: Num = 0.0
    """Flag: the output projection of attention has a bias."""
    mlp_bias: Num = 0.0
    """Flag: the projections of the MLP have a bias."""
    block_norms: Num = 2.0
    """Norms of the stream in a block, and of what its branches give."""
    extra_streams: Num = 0.0
    """Tensors of the width of the stream that a block keeps beside those of Llama: of norms after
    branches, or none for what both branches read."""
    norms_before: Num = 1.0
    """Flag: a branch has a norm before it."""
    head_norms: Num = 0.0
    """Weights of the norms of queries and keys, each over a head."""
    width_norms: Num = 0.0
    """The same of norms over all heads together, of which tensor ranks have parts."""
    query_rank: Num = 0.0
    """Width that latent attention leads queries down to; 0 without it."""
    kv_rank: Num = 0.0
    """Width that latent attention leads keys and values down to; 0 without it."""
    rope_dim: Num = 0.0
    """Width of the rotary keys of latent attention."""
    kv_up_dim: Num = 0.0
    """Width that latent attention leads keys and values back up to."""
    value_dim: Num = 0.0
    """Width of all value heads of latent attention; 0 without it."""
    experts: Num = 0.0
    """Routed experts of a block; 0: the model is dense."""
    top_k: Num = 0.0
    """Experts that a token meets."""
    expert_ffn: Num = 0.0
    """Inner width of an expert."""
    shared_experts: Num = 0.0
    """Experts that every token meets."""
    expert_bias: Num = 0.0
    """Flag: the matrices of routed experts have biases."""
    logit_bias: Num = 0.0
    """Flag: the logits of routers have a bias."""
    dense_layers: Num = 0.0
    """Blocks from the first on that are dense in a mixture."""

    frozen: Num = 0.0
    """Flag: adapters alone are trained."""
    trained: Num = 1.0
    """Part of all weights that is trained."""
    adapters_attention_in: Num = 0.0
    """Rows of the A of all adapters of queries, keys and values of a block."""
    adapters_attention_out: Num = 0.0
    """Those of the output projection of attention."""
    adapters_mlp_in: Num = 0.0
    """Those of the layers that read the input of the MLP."""
    adapters_mlp_out: Num = 0.0
    """Those of the last layer of the MLP."""
    adapters_whole: Num = 0.0
    """Weights of the adapters of a block that every tensor rank has."""
    adapters_split: Num = 0.0
    """Weights of those that tensor ranks share out."""

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

    Where ranks share cores, rates are those of a rank while all of them are at work.
    """

    peak_flops: Num
    """FLOP/s of products of weights."""
    attention_flops: Num
    """FLOP/s of attention; less than `peak_flops` where products are done in fp8."""
    memory_bytes: Num
    """Bytes of memory."""
    memory_bandwidth: Num
    """Bytes/s of the memory."""
    matmul: Num
    """Part of the peak that large products reach."""
    half_depth: Num
    """Depth of a product at which it reaches half of that."""
    tile: Num
    """Rows and columns of a result that a unit computes at a time."""
    units: Num
    """Multiprocessors or cores."""
    memory: Num
    """Part of the memory's bandwidth that is reached."""
    attention: Num
    """Part of the peak that fused attention reaches forward."""
    attention_backward: Num
    """Part of the peak that fused attention reaches backward."""
    optimizer: Num
    """Part of the memory's bandwidth that updates reach."""
    aligned: Num
    """Factor on the rate of a product for each halving of how its rows are aligned."""
    node: Num
    """Devices of a node."""
    tiers: tuple[TierNumbers, ...]
    """The links, fastest first."""
    share: Num = 1.0
    """Part of a core that a rank has while all are at work; 1 where none are shared."""
    launch_s: Num = 5e-6
    """Seconds that a kernel takes to start."""
    half_reach: Num = 0.0
    """Keys that a query meets in one call at which fused attention reaches half of its rate."""
    host_bandwidth: Num = PCIE_4_BYTES_PER_S
    """Bytes/s of the link to the memory of the host, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNumbers:
    """Give the split of a run; each a number, or an array [plans]."""

    tp: Num = 1.0
    """Degree of tensor parallelism."""
    cp: Num = 1.0
    """Degree of context parallelism."""
    pp: Num = 1.0
    """Pipeline ranks."""
    dp_shard: Num = 1.0
    """Data ranks over which ZeRO cuts (times `cp`)."""
    dp_replicate: Num = 1.0
    """Copies of what ZeRO cuts; `dp_shard` x `dp_replicate` is the data-parallel degree."""
    ep: Num = 1.0
    """Degree of expert parallelism."""
    expert_tp: Num = 1.0
    """Pieces that experts are cut into, as `tp` cuts dense MLPs."""
    two_hop: Num = 0.0
    """Flag: rows go to their experts in two hops."""
    chunks: Num = 1.0
    """Parts in which rows are dispatched, one by one."""
    padding: Num = 1.0
    """Rows that are sent for each that there is, where sizes do not depend on the routing."""
    sequence_parallel: Num = 0.0
    """Flag: the residual stream is cut over `tp`."""
    tp_overlap: Num = 0.0
    """Flag: products run beside the messages of their rows, chunk by chunk."""
    ulysses: Num = 1.0
    """Part of `cp` that exchanges heads."""
    gathered: Num = 0.0
    """Flag: the rest of `cp` gathers keys; else it is a ring."""
    microbatch: Num = 1.0
    """Sequences of a microbatch."""
    microbatches: Num = 1.0
    """Microbatches of one data-parallel rank in a step."""
    virtual: Num = 1.0
    """Stages on each pipeline rank."""
    schedule: Num = 0.0
    """Index of a schedule in `SCHEDULES`."""
    zero: Num = 0.0
    """ZeRO stage."""
    reshard: Num = 1.0
    """Flag: at stage 3, parameters are freed after each use."""
    recompute: Num = 0.0
    """Share of blocks that run forward again."""
    selective: Num = 0.0
    """Flag: of the other blocks attention runs again."""
    redone_norm: Num = 0.0
    """Flag: of those, norms run again, but for that before experts."""
    redone_activation: Num = 0.0
    """Flag: of those, activations of dense MLPs run again."""
    redone_mlp: Num = 0.0
    """Flag: of those, dense MLPs run again up to their last layer."""
    per_op: Num = 0.0
    """Flag: blocks keep their attention and every second product, and run the rest again."""
    offload: Num = 0.0
    """Share of the optimizer state that is in the memory of the host."""
    parameter_offload: Num = 0.0
    """Flag: parameters that ZeRO cuts wait in the memory of the host, too."""
    gathered_bytes: Num = 0.0
    """Bytes of a weight of a block as ZeRO 3 gathers it; 0: those of an element."""
    gathers_ends: Num = 0.0
    """Flag: so are embedding and head, and what a node keeps are elements again (int8)."""
    secondary: Num = 0.0
    """Flag: all gathers of a step but the first are inside of nodes."""
    summed_bytes: Num = 0.0
    """Bytes of a gradient that is summed in two hops of codes; 0: it is summed exactly."""
    sums: Num = 0.0
    """Index of how gradients are summed in `COLLECTIVE_ALGORITHMS`."""
    servers: Num = 0.0
    """Parameter servers beside the ranks that compute."""
    round_steps: Num = 0.0
    """Steps that the replicas of `dp_replicate` train alone, as islands of local SGD; 0: none."""
    fragments: Num = 1.0
    """Parts of the model that islands send each other in steps of their own."""
    delay: Num = 0.0
    """Steps in which what islands send is under way."""
    outer_bytes: Num = 0.0
    """Bytes of a weight that an island sends."""
    outer_gathers: Num = 0.0
    """Flag: islands gather what the others send, and add it up themselves."""

    @property
    def dp(self) -> Num:
        """Return the data-parallel degree."""
        return self.dp_shard * self.dp_replicate

    @property
    def apart(self) -> NDArray[np.bool_]:
        """Return whether replicas are islands, and outermost; else they sum in each step."""
        return np.asarray(self.round_steps) > 0.0

    @property
    def dp_together(self) -> Num:
        """Return the data ranks that take a step together."""
        return np.asarray(np.where(self.apart, self.dp_shard, self.dp))

    @property
    def devices(self) -> Num:
        """Return the number of devices: of ranks, servers included."""
        return self.tp * self.cp * self.pp * self.dp + self.servers

    @property
    def shard(self) -> Num:
        """Return over how many ranks ZeRO cuts what is not of experts."""
        return self.dp_shard * self.cp

    @property
    def expert_shard(self) -> Num:
        """Return over how many ranks ZeRO cuts routed experts."""
        return np.maximum(1.0, self.tp * self.shard / (self.ep * self.expert_tp))


def stacked_layouts(layouts: Sequence[LayoutNumbers]) -> LayoutNumbers:
    """Return the layouts of several plans as arrays; what is the same in all is a number."""
    changed: dict[str, Any] = {}
    for item in fields(LayoutNumbers):
        values = [getattr(one, item.name) for one in layouts]
        same = all(value == values[0] for value in values)
        changed[item.name] = values[0] if same else np.array(values, dtype=float)
    return LayoutNumbers(**changed)


def first_number(value: Num) -> float:
    """Return a number, of an array its first entry."""
    return float(np.asarray(value).reshape(-1)[0])


def ceil_div(value: Num, by: Num) -> Num:
    """Return `value` / `by`, rounded up."""
    return -(-value // by)
