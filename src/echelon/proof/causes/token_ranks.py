# SPDX-License-Identifier: Apache-2.0
"""Which rank holds each position of a sequence, and which one routes and dispatches each token.

Shape suffixes: B sequences of the global batch, T positions, N = T * B tokens (sequence first).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echelon.core.attention_mask import Placement
from echelon.core.plan import Plan
from echelon.cost.bytes.context_sent import kv_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPositions:
    """Say of each position where it lies: on which ring place, in which run, on which rank.

    `row_T` counts the rows of a ring place, `local_T` those of a context rank, `index_T` those of
    a run; `step_T` is the step of the run.
    """

    placement: Placement
    ring_rank_T: torch.Tensor
    row_T: torch.Tensor
    run_T: torch.Tensor
    index_T: torch.Tensor
    step_T: torch.Tensor
    rank_T: torch.Tensor
    local_T: torch.Tensor

    @property
    def contiguous_T(self) -> torch.Tensor:
        """Return the position that each would have if every rank held one contiguous chunk."""
        return self.rank_T * (self.placement.length // self.placement.degree) + self.local_T

    def moved(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the ring place `shift` further."""
        return self._at_rows(self.ring_rank_T, self.row_T, self.placement.ring_degree, shift)

    def moved_ranks(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the context rank `shift` further."""
        return self._at_rows(self.rank_T, self.local_T, self.placement.degree, shift)

    def _at_rows(
        self, owner_T: torch.Tensor, row_T: torch.Tensor, degree: int, shift: int
    ) -> torch.Tensor:
        size = self.placement.length // degree
        key_T = owner_T * size + row_T
        at_T = torch.empty_like(key_T)
        at_T[key_T] = torch.arange(self.placement.length)
        return at_T[(owner_T + shift) % degree * size + row_T]


def context_positions(placement: Placement) -> ContextPositions:
    """Return where the positions of a sequence lie."""
    names = ("ring_rank_T", "row_T", "run_T", "index_T", "step_T", "rank_T", "local_T")
    found = {name: torch.zeros(placement.length, dtype=torch.int64) for name in names}
    number = 0
    for place in range(placement.ring_degree):
        row = 0
        for run in placement.ring_runs(place):
            index = torch.arange(run.count)
            positions = [run.position(i) for i in range(run.count)]
            values = (place, row + index, number, index, run.step)
            for name, value in zip(names, values, strict=False):
                found[name][positions] = torch.as_tensor(value)
            row += run.count
            number += 1
    for rank in range(placement.degree):
        for local, position in enumerate(placement.positions(rank)):
            found["rank_T"][position], found["local_T"][position] = rank, local
    return ContextPositions(placement=placement, **found)


def heads_of_member(plan: Plan, member: int) -> list[int]:
    """Return the query heads that one member of each Ulysses group attends with."""
    own = plan.model.heads // plan.mesh.tp
    few = own // plan.layout.context.ulysses_degree
    return [tp * own + member * few + i for tp in range(plan.mesh.tp) for i in range(few)]


def copies_of(plan: Plan) -> int:
    """Return to how many members of a Ulysses group each key/value head is sent."""
    tp, degree = plan.mesh.tp, plan.layout.context.ulysses_degree
    return kv_copies(plan.model.heads // tp, max(1, plan.model.kv_heads // tp), degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Say of each token where it is routed: replica, microbatch, context and tensor rank, and row.

    `row_N` is its place among the rows of that microbatch on that context rank.
    """

    sequence_N: torch.Tensor
    data_N: torch.Tensor
    microbatch_N: torch.Tensor
    context_N: torch.Tensor
    tensor_N: torch.Tensor
    row_N: torch.Tensor

    def scope(self, *names: str) -> torch.Tensor:
        """Return a number for each token, the same for those that have all of `names` alike."""
        scope_N = torch.zeros_like(self.row_N)
        for name in names:
            one_N = getattr(self, f"{name}_N")
            scope_N = scope_N * (int(one_N.max()) + 1) + one_N
        return scope_N.unique(return_inverse=True)[1]


def token_rows(plan: Plan) -> TokenRows:
    """Return where the tokens of a global batch are routed under `plan`."""
    mathematics, size = plan.mathematics, plan.layout.microbatch_sequences
    places = context_positions(plan.placement)
    sequences, length = mathematics.global_sequences, mathematics.sequence_length
    sequence_N = torch.arange(sequences).repeat(length)
    position_N = torch.arange(length).repeat_interleave(sequences)
    microbatch_N = sequence_N // size
    row_N = places.local_T[position_N] * size + sequence_N % size
    rows = length // plan.mesh.cp * size
    return TokenRows(
        sequence_N=sequence_N,
        data_N=microbatch_N // plan.num_microbatches,
        microbatch_N=microbatch_N % plan.num_microbatches,
        context_N=places.rank_T[position_N],
        tensor_N=row_N * plan.mesh.tp // rows,
        row_N=row_N,
    )


def dispatched_tokens(plan: Plan) -> Iterator[torch.Tensor]:
    """Yield the tokens that one rank sends to experts at a time, in the order of its rows."""
    rows = token_rows(plan)
    names = ("data", "microbatch", "context")
    whole = plan.layout.experts.expert_tp == 1
    scope_N = rows.scope(*names, "tensor") if whole else rows.scope(*names)
    for number in range(int(scope_N.max()) + 1):
        tokens = torch.nonzero(scope_N == number)[:, 0]
        in_order = tokens[rows.row_N[tokens].argsort()]
        yield from in_order.chunk(plan.layout.experts.chunks)
