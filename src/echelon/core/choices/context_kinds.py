# SPDX-License-Identifier: Apache-2.0
"""The ways in which context ranks let each query meet each key, each as one record.

`cp = u x n`: u neighbours exchange heads for positions, and n places are on a ring, around which
keys and values go or over which they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echelon.core.attention_mask import PlacementKind
from echelon.core.choices.registry import Registry

HeadExchange = Literal["none", "all", "inner"]
"""Among whom heads are exchanged: nobody, all context ranks, or as many as a degree says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextKindFacts:
    """Say in words what one kind splits, sends and holds, what must divide, and when to take it.

    The letters are those of `cost/bytes/context_memory.py`.
    """

    splits: str
    forward: str
    backward: str
    holds: str
    divides: str
    when: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextKindRecord:
    """State the facts of one kind, from which rules and bytes follow, and name its runner."""

    name: str
    """What `context.kind` takes."""
    facts: ContextKindFacts
    """The same in words."""
    placement: PlacementKind = "zigzag"
    """Which positions each place of a ring holds."""
    runner: str = "echelon.parallel.context.ring:RingAttention"
    """"module:class" of the autograd function over a ring: `apply(q, k, v, ring_context)`."""
    exchange: HeadExchange = "none"
    """Among whom heads are exchanged for positions."""
    gathers_keys: bool = False
    """Whether each place gets all keys at once that it needs, not one place's after the other."""
    symbol: str = ""
    """What stands behind the degree in tables of plans."""
    outdone_by: str | None = None
    """The kind where which is legal a search leaves this one out: as many bytes, as much work."""
    tool_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its names in other tools, by the names of the tools."""

    def chunks(self, ring_degree: int) -> int:
        """Return into how many chunks a ring cuts a sequence; 1 where each length will do."""
        return 2 * ring_degree if self.placement == "zigzag" and ring_degree > 1 else 1

    def exchange_degree(self, cp: int, degree: int) -> int:
        """Return among how many ranks heads are exchanged, where a plan says `degree`."""
        return {"none": 1, "all": cp, "inner": degree}[self.exchange]


PLAIN_CONTEXT_KIND = "ring"
"""What stands where none is named, and where no sequence is cut."""

_KINDS = (
    ContextKindRecord(
        name="ring",
        facts=ContextKindFacts(
            splits="positions, zigzag: place i has chunks i and 2n-1-i",
            forward="(n-1) KV s, neighbour to neighbour; causal: what is hidden is not sent",
            backward="(n-1) KV s again, and (n-1) KV w of gradients",
            holds="its own chunk, the one at work and the next one",
            divides="2 cp | T",
            when="any degree, any heads; transfers hide where a step works longer than its keys "
            "travel",
            source="Liu et al., Ring Attention, 2023",
        ),
        tool_names={"megatron": "p2p", "torchtitan": "alltoall", "accelerate": "alltoall"},
    ),
    ContextKindRecord(
        name="striped",
        facts=ContextKindFacts(
            splits="positions, dealt out one by one: place i has i, i+n, i+2n, ...",
            forward="(n-1) KV s, neighbour to neighbour, whatever the mask hides",
            backward="(n-1) KV s again, and (n-1) KV w of gradients",
            holds="its own chunk, the one at work and the next one",
            divides="cp | T",
            when="2 cp does not divide T, or documents are short: each is dealt out over all ranks",
            source="Brandon et al., Striped Attention, 2023",
        ),
        placement="striped",
        symbol="s",
        outdone_by="ring",
    ),
    ContextKindRecord(
        name="gathered",
        facts=ContextKindFacts(
            splits="positions, zigzag",
            forward="(n-1) KV s, an all-gather; windows: the rows within reach, from their owners",
            backward="(n-1) KV s again, and a reduce-scatter of (n-1) KV w",
            holds="all keys and values, twice while they are put in order: grows with T",
            divides="2 cp | T",
            when="few key/value heads beside query heads, any mask, a sequence that fits",
            source="Grattafiori et al., Llama 3, 2024, section 3.3.2",
        ),
        runner="echelon.parallel.context.gathered:GatheredAttention",
        gathers_keys=True,
        symbol="g",
        tool_names={"megatron": "all_gather", "torchtitan": "allgather", "accelerate": "allgather"},
    ),
    ContextKindRecord(
        name="ulysses",
        facts=ContextKindFacts(
            splits="positions outside of attention, heads inside",
            forward="(u-1)/u (2 O + KV) s, two all-to-alls",
            backward="the same",
            holds="its queries, keys and values packed and exchanged",
            divides="cp | T, cp | heads / tp",
            when="fast links and enough heads: few bytes at any T, local attention as on one "
            "device",
            source="Jacobs et al., DeepSpeed-Ulysses, 2023",
        ),
        exchange="all",
        symbol="u",
        tool_names={"megatron": "a2a", "deepspeed": "ulysses"},
    ),
    ContextKindRecord(
        name="ulysses-ring",
        facts=ContextKindFacts(
            splits="heads among u neighbours, positions over n = cp / u places of a ring",
            forward="(u-1)/u (2 O + KV) s on fast links, (n-1) KV s on slow ones",
            backward="as both",
            holds="as the ring, of 1/u of the heads",
            divides="2 n | T, cp | T, u | heads / tp",
            when="more ranks than heads, over several nodes: all-to-alls stay within one",
            source="Fang and Zhao, USP, 2024",
        ),
        exchange="inner",
        symbol="u",
        tool_names={"megatron": "a2a+p2p"},
    ),
)

CONTEXT_KINDS = Registry("context kind", _KINDS)
"""The record of each kind, by the name that `context.kind` takes."""


def kinds_with_degree() -> list[str]:
    """Return the kinds for which a degree says how many ranks exchange heads."""
    return [name for name, record in CONTEXT_KINDS.items() if record.exchange == "inner"]


def context_kind_index(name: str) -> int:
    """Return the number of a kind: its place in the registry."""
    return list(CONTEXT_KINDS).index(name)
