"""Which rank routes and dispatches each token, as tensors over the tokens of a global batch.

Shape suffixes: B sequences of the global batch, T positions, N = T * B tokens (sequence first).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.prove.context_places import context_places


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
    places = context_places(plan.placement)
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


def dispatches(plan: Plan) -> Iterator[torch.Tensor]:
    """Yield the tokens that one rank sends to experts at a time, in the order of its rows."""
    rows = token_rows(plan)
    names = ("data", "microbatch", "context")
    whole = plan.layout.experts.expert_tp == 1
    scope_N = rows.scope(*names, "tensor") if whole else rows.scope(*names)
    for number in range(int(scope_N.max()) + 1):
        tokens = torch.nonzero(scope_N == number)[:, 0]
        in_order = tokens[rows.row_N[tokens].argsort()]
        yield from in_order.chunk(plan.layout.experts.chunks)
