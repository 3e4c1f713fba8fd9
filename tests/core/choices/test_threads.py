"""Rows of a batch for replicas: as `torch.chunk` cuts, with none left over."""

from __future__ import annotations

import torch

from echelon.core.choices.threads import replica_rows


def test_rows_are_those_of_chunks() -> None:
    for rows in range(1, 20):
        for replicas in range(1, 7):
            chunks = torch.zeros(rows).chunk(replicas)
            assert replica_rows(rows, replicas) == tuple(map(len, chunks))
    assert replica_rows(0, 3) == (0,)
