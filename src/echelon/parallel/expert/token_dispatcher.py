# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts and back: straight to the ranks of their experts.

Split: the experts, `num_experts / ep` on each rank of the expert group.
Sent:  the counts for each expert (all-to-all), then each token once for each of its experts on
       other ranks, with its gate (uneven all-to-all); the outputs back the same way; in backward
       the transposes of both.
Bytes: `flat_dispatch_bytes` in `cost/bytes/expert_sent.py`.
Must divide: ep | num_experts; ep | dp_shard x cp (x tp where experts are whole).
Source: Lepikhin et al., "GShard", 2020; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5.

A dispatcher has two motions, each the transpose of the other: `dispatch` copies rows of tokens to
the experts, `combine` adds up what experts made of them, token by token. So forward is dispatch,
experts, combine, and so is backward. Assignments are sorted by expert once; what arrives is
arranged so that the rows of an expert lie side by side, in the order of the ranks that they come
from.

Alone (ep = 1) nothing is sent, so sizes need not be known: where experts take rows that only the
device counts (`grouped_matmul.py`), all assignments are rows then, those that are dropped behind
the last expert.

Shape suffixes: n tokens of this rank, K experts of a token, S assignments that leave, R rows that
arrive, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from echelon.models.moe import counts_of
from echelon.parallel.expert.grouped_matmul import RowCounts, ends_of
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.kernels.expert_kernels import row_sums
from echelon.parallel.transport.collectives import Group, Pending

AwaitRows = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Wait for rows, and for the number that goes with each where there is one."""


ROWS_OF_EXPERTS = "the rows of experts"
"""What the host reads where sizes follow from the routing."""

Transfer = tuple[Callable[[], torch.Tensor], Pending]
"""What arranges the rows that come, once the other is awaited."""


def start_both(
    start: Callable[[torch.Tensor, str], Transfer],
    rows: torch.Tensor,
    gates: torch.Tensor | None,
    name: str,
) -> AwaitRows:
    """Start a motion of rows, and the same of the gates that go with them, where there are any."""
    rows_there, rows_sent = start(rows, name)
    gates_there, gates_sent = None, Pending()
    if gates is not None:
        gates_there, gates_sent = start(gates, f"{name}.gates")

    def arrive() -> tuple[torch.Tensor, torch.Tensor | None]:
        rows_sent.wait()
        gates_sent.wait()
        return rows_there(), None if gates_there is None else gates_there()

    return arrive


class SortedAssignments:
    """The assignments of tokens in the order of their experts: `slot_S` is token x K + place.

    How many of them are kept only the device knows; until the host does (`keep`), there are none.
    """

    def __init__(self, routed: TokenRouting, num_experts: int) -> None:
        """Sort the assignments, what is dropped last."""
        self.num_tokens, self.top_k = routed.chosen_nK.shape
        self._num_experts = num_experts
        experts_S = routed.chosen_nK.reshape(-1)
        self._kept_nK = routed.kept_nK
        if self._kept_nK is not None:
            experts_S = experts_S.masked_fill(~self._kept_nK.reshape(-1), num_experts)
        self._experts_S, self.slot_S = experts_S.sort(stable=True)
        self.dropped_S: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """Return how many rows each expert gets, int64 [E]."""
        size = self._num_experts
        if self._kept_nK is None:
            return counts_of(self._experts_S, size)
        return counts_of(self._experts_S, size + 1)[:size].clone()

    def keep_all(self) -> torch.Tensor:
        """Take all assignments for rows; return where those of each expert end, int32 [E].

        Behind the last end is what is dropped: `dropped_S`, if there may be any.
        """
        ends_E = ends_of(self._experts_S, self._num_experts)
        if self._kept_nK is not None:
            self.dropped_S = self._experts_S == self._num_experts
            self._kept_nK = None
        self.keep(len(self.slot_S))
        return ends_E

    def keep(self, count: int) -> None:
        """Learn that `count` assignments are kept, and find the rows of each token once."""
        if count < len(self.slot_S):
            self.slot_S = self.slot_S[:count].clone()  # not a part of what else would be kept
        self.token_S = self.slot_S // self.top_k
        self._order_S = self.slot_S.argsort()
        if self._kept_nK is None:
            ends_n = torch.arange(1, self.num_tokens + 1, device=self.slot_S.device) * self.top_k
            self._starts_n = ends_n - self.top_k
        else:
            counts_n = self._kept_nK.sum(1)
            self._starts_n = counts_n.cumsum(0) - counts_n
        self._kept_nK = None
        del self._experts_S

    def without_dropped(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows, or numbers that go with them, with zeros for what is dropped."""
        if self.dropped_S is None:
            return rows
        dropped = self.dropped_S if rows.dim() == 1 else self.dropped_S[:, None]
        return rows.masked_fill(dropped, 0)

    def add_up(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Return x_nD, the sums of the rows of each token; one without rows gets zeros."""
        if not len(rows_SD):
            return rows_SD.new_zeros((len(self._starts_n), rows_SD.shape[1]))
        rows_SD = self.without_dropped(rows_SD)
        return row_sums(rows_SD, self._order_S, self._starts_n)


class FlatTokenDispatcher:
    """Send each assignment straight to the rank of its expert."""

    def __init__(
        self,
        routed: TokenRouting,
        num_experts: int,
        group: Group,
        *,
        even_rows: int | None = None,
        counted_by_host: bool = True,
    ) -> None:
        """Tell the others how many rows they get; every rank of the group does so together.

        `even_rows` are what this rank would keep in all, where the routing has no elements: by
        default all assignments. Who is alone need not count (`counted_by_host`).
        """
        self._group = group
        self._sorted = SortedAssignments(routed, num_experts)
        self.rows_by_expert: RowCounts
        if group.size == 1 and not counted_by_host:
            self.rows_by_expert = self._sorted.keep_all()
            return
        leaving = self._sorted.counts().view(group.size, -1)
        arriving = torch.empty_like(leaving)
        group.all_to_all(arriving, leaving, name="experts.counts").wait()
        # The sizes of what follows: on a GPU the host waits for them here, and nowhere else.
        with group.recorder.reading(ROWS_OF_EXPERTS):
            both = torch.stack([leaving, arriving]).cpu()
        if routed.chosen_nK.is_meta:
            rows = routed.chosen_nK.numel() if even_rows is None else even_rows
            both = even_counts(rows, num_experts, group)
        self._num_sent: list[int] = both[0].sum(1).tolist()
        self._num_received: list[list[int]] = both[1].tolist()
        self.rows_by_expert = both[1].sum(0).tolist()
        self._sorted.keep(sum(self._num_sent))

    def dispatch(
        self, x_nD: torch.Tensor, gates_nK: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to copy tokens to their experts."""
        rows_SD = x_nD.index_select(0, self._sorted.token_S)
        gates_S = None
        if gates_nK is not None:
            gates_S = gates_nK.reshape(-1).index_select(0, self._sorted.slot_S)
        if self._group.size == 1:
            return lambda: (rows_SD, gates_S)
        return start_both(self._to_experts, rows_SD, gates_S, name)

    def combine(
        self, rows_RD: torch.Tensor, gates_R: torch.Tensor | None, *, name: str
    ) -> AwaitRows:
        """Start to add up rows for each token."""
        if self._group.size == 1:
            return lambda: self._added_up(rows_RD, gates_R)
        back = start_both(self._from_experts, rows_RD, gates_R, name)
        return lambda: self._added_up(*back())

    def _to_experts(self, parts: torch.Tensor, name: str) -> Transfer:
        arriving = [sum(counts) for counts in self._num_received]
        pieces, sent = self._all_to_all(parts, self._num_sent, arriving, name)
        return partial(self._by_expert, pieces), sent

    def _from_experts(self, parts: torch.Tensor, name: str) -> Transfer:
        leaving = [sum(counts) for counts in self._num_received]
        pieces, sent = self._all_to_all(self._by_rank(parts), leaving, self._num_sent, name)
        return partial(torch.cat, pieces), sent

    def _added_up(
        self, rows_SD: torch.Tensor, gates_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        gates_nK = None
        if gates_S is not None:
            shape = (self._sorted.num_tokens, self._sorted.top_k)
            gates_nK = gates_S.new_zeros(shape)
            gates_nK.view(-1)[self._sorted.slot_S] = self._sorted.without_dropped(gates_S)
        return self._sorted.add_up(rows_SD), gates_nK

    def _all_to_all(
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
        pieces = [
            part.split(counts) for part, counts in zip(parts, self._num_received, strict=True)
        ]
        return torch.cat([rows for of_expert in zip(*pieces, strict=True) for rows in of_expert])

    def _by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are sorted by expert sorted by rank, then by expert."""
        ranks, experts = range(len(self._num_received)), range(len(self._num_received[0]))
        pieces = rows.split([self._num_received[r][e] for e in experts for r in ranks])
        return torch.cat([pieces[e * len(ranks) + r] for r in ranks for e in experts])


def even_counts(num_rows: int, num_experts: int, group: Group) -> torch.Tensor:
    """Return what leaves and what arrives, [2, ranks, experts of one], if all get as many rows.

    Rows that are left over go to the next ranks of the group, one each, so that what a rank sends
    and gets is the same for all: that of `balanced_rows` in `layout/expert_load.py`.
    """
    each, more = divmod(num_rows, group.size)
    here = num_experts // group.size
    found = torch.zeros((2, group.size, here), dtype=torch.int64, device="cpu")
    for place in range(group.size):
        steps = (place - group.index) % group.size, (group.index - place) % group.size
        for way, step in enumerate(steps):
            rows, beyond = divmod(each + (1 <= step <= more), here)
            found[way, place] = rows
            found[way, place, :beyond] += 1
    return found
