# SPDX-License-Identifier: Apache-2.0
"""What one forward pass reads: a microbatch in the layout that the decoder computes in.

Shape suffixes: B sequences, T positions on this rank, N = T * B tokens, sequence first: token
(t, b) is row t * B + b, so a cut along the sequence is a contiguous block of rows and needs no copy
to be sent. Under context parallelism a rank holds some positions of every sequence (`runs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.attention_mask import DocumentStarts, PositionRun

IGNORED_LABEL = -100
"""The label of a position that takes no part in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Hold the tokens of one microbatch that one rank works on: N positions of B sequences."""

    tokens_N: torch.Tensor
    """Token ids, int64 [N]."""
    labels_N: torch.Tensor
    """Ids of the tokens to predict, int64 [N]."""
    sample_ids_B: torch.Tensor
    """Global ids of the sequences, int64 [B]; they key dropout, with `step` and `seed`."""
    runs: tuple[PositionRun, ...]
    """The positions that the rows are, in order, out of `whole_length`."""
    whole_length: int
    """Positions of a whole sequence."""
    documents: DocumentStarts | None = None
    """Where documents start in the whole sequences, whatever part is here; attention stays inside
    each."""
    step: int = 0
    """The optimizer step."""
    seed: int = 0
    """The seed of the run."""
    train: bool = True
    """Whether dropout is on."""
    counted: int | None = None
    """The tokens here that take part in the loss, counted before the batch left the host; None on
    the host, which counts when it is asked. A device would have to be waited for."""

    @property
    def num_sequences(self) -> int:
        """Return B."""
        return self.sample_ids_B.numel()

    @property
    def num_positions(self) -> int:
        """Return T, the positions of each sequence that are here."""
        return self.tokens_N.numel() // self.num_sequences

    @property
    def positions_T(self) -> torch.Tensor:
        """Return the positions that are here, int64, beside the tokens."""
        return positions_of(self.runs, self.tokens_N.device)

    def num_valid(self) -> int:
        """Return the number of tokens here that take part in the loss."""
        if self.counted is not None:
            return self.counted
        return int((self.labels_N != IGNORED_LABEL).sum())

    @classmethod
    def from_rows(
        cls,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        sample_ids_B: torch.Tensor,
        *,
        step: int = 0,
        seed: int = 0,
        train: bool = True,
    ) -> TokenBatch:
        """Return the batch of whole sequences given one per row, all of their documents joined."""
        length = tokens_BT.shape[1]
        return cls(
            tokens_N=tokens_BT.t().reshape(-1).contiguous(),
            labels_N=labels_BT.t().reshape(-1).contiguous(),
            sample_ids_B=sample_ids_B,
            runs=(PositionRun(0, 1, length),),
            whole_length=length,
            step=step,
            seed=seed,
            train=train,
        )

    def cut(
        self, runs: Sequence[PositionRun], documents: DocumentStarts | None = None
    ) -> TokenBatch:
        """Return the positions of `runs` of a batch of whole sequences that have these documents.

        No runs mean all positions. Raises ValueError where a run goes beyond the sequences.
        """
        held = tuple(runs) or self.runs
        if any(run.count and run.position(run.count - 1) >= self.whole_length for run in held):
            raise ValueError(f"{held} goes beyond sequences of {self.whole_length} positions")
        if held == self.runs:
            return replace(self, documents=documents)
        positions_T = positions_of(held, self.tokens_N.device)
        tokens_TB = self.tokens_N.view(self.whole_length, -1)[positions_T]
        labels_TB = self.labels_N.view(self.whole_length, -1)[positions_T]
        return replace(
            self,
            tokens_N=tokens_TB.reshape(-1),
            labels_N=labels_TB.reshape(-1),
            runs=held,
            documents=documents,
            counted=None,
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors of the batch: tokens, labels, sample ids."""
        return self.tokens_N, self.labels_N, self.sample_ids_B

    def moved(self, tensors: Sequence[torch.Tensor]) -> TokenBatch:
        """Return the batch with its tensors elsewhere, in the order of `tensors`."""
        tokens_N, labels_N, sample_ids_B = tensors
        return replace(
            self,
            tokens_N=tokens_N,
            labels_N=labels_N,
            sample_ids_B=sample_ids_B,
            counted=self.num_valid(),
        )

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch with its tensors on `device`; the host does not wait for a GPU."""
        if self.tokens_N.device == device:
            return self
        return self.moved([start_copy(one, device) for one in self.tensors()])


def start_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor of the host on `device`.

    From pageable memory torch waits for the copy, and so for all that the GPU was given before.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def positions_of(runs: Sequence[PositionRun], device: torch.device) -> torch.Tensor:
    """Return the positions of `runs` in order, int64."""
    parts = [
        torch.arange(run.start, run.start + run.step * run.count, run.step, device=device)
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
