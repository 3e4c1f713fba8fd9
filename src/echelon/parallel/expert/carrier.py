"""Tokens on their way to experts and back: straight to the ranks of their experts.

Split: the experts, `num_experts / ep` on each rank of the expert group.
Sent:  the counts for each expert (all-to-all), then each token once for each of its experts on
       other ranks, with its gate (uneven all-to-all); the outputs back the same way; in backward
       the transposes of both.
Bytes: `cost.expert_dispatch.flat_bytes`.
Must divide: ep | num_experts; ep | dp_shard x cp (x tp where experts are whole).
Source: Lepikhin et al., "GShard", 2020; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5.

A carrier has two motions, each the transpose of the other: `scatter` copies rows of tokens to the
experts, `collect` adds up what experts made of them, token by token. So forward is scatter,
experts, collect, and so is backward. Assignments are sorted by expert once; what arrives is
arranged so that the rows of an expert lie side by side, in the order of the ranks that they come
from.

Shape suffixes: n tokens of this rank, K experts of a token, S assignments that leave, R rows that
arrive, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from echelon.parallel.collectives import Group, Pending
from echelon.parallel.expert.router import Routed
from echelon.parallel.expert.token_sums import TokenSums

Arrival = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Wait for rows, and for the number that goes with each where there is one."""


class Carrier(Protocol):
    """Carry rows between tokens and experts."""

    @property
    def rows_by_expert(self) -> Sequence[int]:
        """Return how many rows each expert that is here gets."""
        ...

    def scatter(self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str) -> Arrival:
        """Start to copy tokens (and gates) to their experts: rows_RD (and gates_R)."""
        ...

    def collect(self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str) -> Arrival:
        """Start to add up rows for each token: x_nD (and gates_nK, one for each assignment)."""
        ...


@dataclass(frozen=True, slots=True)
class Sorted:
    """The assignments of tokens in the order of their experts: `slot_S` is token x K + place."""

    slot_S: torch.Tensor
    counts_E: torch.Tensor
    num_tokens: int
    top_k: int

    @classmethod
    def of(cls, routed: Routed, num_experts: int) -> Sorted:
        """Return what of `routed` is kept."""
        num_tokens, top_k = routed.chosen_nK.shape
        experts_S = routed.chosen_nK.reshape(-1)
        if routed.kept_nK is None:
            slot_S = experts_S.argsort(stable=True)
        else:
            slots = routed.kept_nK.reshape(-1).nonzero()[:, 0]
            slot_S = slots[experts_S[slots].argsort(stable=True)]
        counts_E = torch.bincount(experts_S[slot_S], minlength=num_experts)
        return cls(slot_S, counts_E, num_tokens, top_k)

    @property
    def token_S(self) -> torch.Tensor:
        """Return the token of each assignment."""
        return self.slot_S // self.top_k


class FlatCarrier:
    """Send each assignment straight to the rank of its expert."""

    def __init__(self, routed: Routed, num_experts: int, group: Group) -> None:
        """Tell the others how many rows they get; every rank of the group does so together."""
        self._group = group
        self._sorted = Sorted.of(routed, num_experts)
        self._token_S = self._sorted.token_S
        self._sums = TokenSums(self._sorted.slot_S, self._sorted.num_tokens, self._sorted.top_k)
        leaving = self._sorted.counts_E.view(group.size, -1)
        arriving = torch.empty_like(leaving)
        group.all_to_all(arriving, leaving, name="experts.counts").wait()
        # The sizes of what follows: on a GPU the host waits for them here.
        both = torch.stack([leaving, arriving]).cpu()
        self._leaving: list[int] = both[0].sum(1).tolist()
        self._arriving: list[list[int]] = both[1].tolist()
        self.rows_by_expert: Sequence[int] = both[1].sum(0).tolist()

    def scatter(self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str) -> Arrival:
        """Start to copy tokens to their experts."""
        rows_SD = x_nD.index_select(0, self._token_S)
        gates_S = None
        if gates_nK is not None:
            gates_S = gates_nK.reshape(-1).index_select(0, self._sorted.slot_S)
        if self._group.size == 1:
            return lambda: (rows_SD, gates_S)
        arriving = [sum(counts) for counts in self._arriving]
        rows, rows_sent = self._exchange(rows_SD, self._leaving, arriving, name)
        gates, gates_sent = [], Pending()
        if gates_S is not None:
            gates, gates_sent = self._exchange(gates_S, self._leaving, arriving, f"{name}.gates")

        def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows_sent.wait()
            gates_sent.wait()
            return self._by_expert(rows), self._by_expert(gates) if gates else None

        return arrive

    def collect(self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str) -> Arrival:
        """Start to add up rows for each token."""
        if self._group.size == 1:
            return lambda: self._added_up(rows_RD, gates_R)
        arriving = [sum(counts) for counts in self._arriving]
        rows, rows_sent = self._exchange(self._by_rank(rows_RD), arriving, self._leaving, name)
        gates, gates_sent = [], Pending()
        if gates_R is not None:
            of_rank = self._by_rank(gates_R)
            gates, gates_sent = self._exchange(of_rank, arriving, self._leaving, f"{name}.gates")

        def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows_sent.wait()
            gates_sent.wait()
            return self._added_up(torch.cat(rows), torch.cat(gates) if gates else None)

        return arrive

    def _added_up(
        self, rows_SD: torch.Tensor, gates_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        gates_nK = None
        if gates_S is not None:
            shape = (self._sorted.num_tokens, self._sorted.top_k)
            gates_nK = gates_S.new_zeros(shape)
            gates_nK.view(-1)[self._sorted.slot_S] = gates_S
        return self._sums.add_up(rows_SD), gates_nK

    def _exchange(
        self, parts: torch.Tensor, sizes: Sequence[int], others: Sequence[int], name: str
    ) -> tuple[list[torch.Tensor], Pending]:
        """Start to send the parts (of `sizes` rows) to the members; return what comes from each."""
        leaving, me = parts.split(list(sizes)), self._group.index
        received = [
            leaving[me] if place == me else parts.new_empty((count, *parts.shape[1:]))
            for place, count in enumerate(others)
        ]
        sends = {p: one for p, one in enumerate(leaving) if p != me and len(one)}
        receives = {p: one for p, one in enumerate(received) if p != me and len(one)}
        return received, self._group.exchange(sends, receives, name=name)

    def _by_expert(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what came from each rank, sorted by expert, then by rank."""
        pieces = [part.split(counts) for part, counts in zip(parts, self._arriving, strict=True)]
        return torch.cat(
            [of_rank[e] for e in range(len(self.rows_by_expert)) for of_rank in pieces]
        )

    def _by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are sorted by expert sorted by rank, then by expert."""
        ranks, experts = range(len(self._arriving)), range(len(self.rows_by_expert))
        pieces = rows.split([self._arriving[r][e] for e in experts for r in ranks])
        return torch.cat([pieces[e * len(ranks) + r] for r in ranks for e in experts])
