"""The Newton-Schulz iteration of Muon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.layout.muon import MuonExchange, MuonMatrix, MuonPiece
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.training.optimizer.muon import (
    HeldMatrixPart,
    MuonGroup,
    MuonMessages,
    as_slice,
    muon_messages,
    newton_schulz,
    range_in_matrix,
)
from tests.parallel.buckets import by_hand, matrix

RANKS = (4, 6)
"""The global ranks of the group."""


def test_the_orthogonal_factor_has_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 6), (5, 9), (9, 5)):
        update = torch.randn(*shape, dtype=torch.float64, generator=generator)
        u, sizes, v = torch.linalg.svd(update, full_matrices=False)
        result = newton_schulz(update, 5)
        assert result.shape == update.shape
        # The polynomial acts on singular values; singular vectors stay.
        inner = u.t() @ result @ v.t()
        torch.testing.assert_close(inner, inner.diag().diag(), rtol=0, atol=1e-12)
        assert 0.3 < float(inner.diag().min()) <= float(inner.diag().max()) < 1.3
        assert float(sizes.max() / sizes.min()) > 1.5
    assert not newton_schulz(torch.zeros(3, 4), 5).any()
    assert newton_schulz(torch.ones(2, 3, dtype=torch.bfloat16), 1).dtype == torch.float32


def piece(bucket_start: int, start: int, stop: int, sender: int, **changes: Any) -> MuonPiece:
    one = MuonPiece(
        bucket="bucket0",
        bucket_start=bucket_start,
        tensor_index=0,
        start=start,
        stop=stop,
        sender=sender,
        holders=(sender,),
    )
    return replace(one, **changes)


def whole(name: str, owner: int, *pieces: MuonPiece) -> MuonMatrix:
    return MuonMatrix(
        name=name, shape=(2, 4), local_shape=(2, 4), split_dim=None, owner=owner, pieces=pieces
    )


# Two matrices of 8 elements in a bucket of 16, cut into slices of 10 and 6: b lies on both ranks.
EXCHANGE = MuonExchange(
    ranks=RANKS,
    matrices=(
        whole("a", 6, piece(0, 0, 8, 4)),
        whole("b", 4, piece(8, 0, 2, 4), piece(10, 2, 8, 6)),
    ),
)


def on(rank: int, *, frozen: str = "") -> tuple[Bucket, MuonMessages]:
    parameters = {"a": matrix(2, 4), "b": matrix(2, 4)}
    for name in frozen:
        parameters[name].requires_grad_(False)
    (bucket,) = by_hand(parameters, [["a", "b"]])
    bucket.own = slice(0, 10) if rank == RANKS[0] else slice(10, 16)
    group = Group("stage", RANKS, rank, None, Recorder(rank, NoEvents()))
    return bucket, muon_messages(bucket, MuonGroup(group=group, exchange=EXCHANGE))


def test_both_ends_of_a_message_pack_alike() -> None:
    (_, first), (_, second) = on(4), on(6)
    assert [matrix.name for matrix in first.owned] == ["b"]
    assert [matrix.name for matrix in second.owned] == ["a"]
    for sent, received in (
        (first.parts_out[1], second.pieces_in[0]),
        (second.parts_out[0], first.pieces_in[1]),
        (first.results_out[1], second.results_in[0]),
        (second.results_out[0], first.results_in[1]),
    ):
        assert sent.content() == received.content()
        assert sent.length == received.length == sum(len(run) for _, run in sent.runs)
    assert first.parts_out[1].content() == (("a", range(8)),)
    assert second.parts_out[0].content() == (("b", range(2, 8)),)


def test_each_piece_of_a_slice_is_where_it_is_sent_from_and_comes_back_to() -> None:
    _, first = on(4)
    _, second = on(6)
    assert first.held == [
        HeldMatrixPart(
            matrix="a",
            place=slice(0, 8),
            decays=True,
            owner=1,
            outgoing=range(8),
            result=range(8),
        ),
        # The owner's own piece goes into the matrix itself, and no message has it.
        HeldMatrixPart(
            matrix="b",
            place=slice(8, 10),
            decays=True,
            owner=0,
            outgoing=range(2),
            result=range(2),
        ),
    ]
    assert [(part.matrix, part.place, part.result) for part in second.held] == [
        ("b", slice(0, 6), range(6))
    ]


def test_a_copy_is_sent_by_one_holder_and_the_result_to_all() -> None:
    shared = replace(EXCHANGE.matrices[0], pieces=(piece(0, 0, 8, 4, holders=RANKS),))
    exchange = replace(EXCHANGE, matrices=(shared,))
    (bucket,) = by_hand({"a": matrix(2, 4), "b": matrix(2, 4)}, [["a", "b"]])
    found: list[MuonMessages] = []
    for rank in RANKS:
        group = Group("stage", RANKS, rank, None, Recorder(rank, NoEvents()))
        found.append(muon_messages(bucket, MuonGroup(group=group, exchange=exchange)))
    assert found[0].held[0].outgoing == range(8)
    assert found[1].held[0].outgoing is None
    assert found[1].held[0].result == range(8)
    assert list(found[1].results_out) == [0]
    assert found[1].parts_out == {}


def test_what_is_frozen_is_not_exchanged() -> None:
    _, messages = on(4, frozen="b")
    assert [part.matrix for part in messages.held] == ["a"]
    assert messages.owned == []
    assert messages.pieces_in == {}


def test_tensor_slices_of_a_matrix_lie_one_after_another() -> None:
    cut = MuonMatrix(name="a", shape=(2, 8), local_shape=(2, 4), split_dim=1, owner=4, pieces=())
    assert range_in_matrix(cut, piece(0, 3, 5, 4)) == range(3, 5)
    assert range_in_matrix(cut, piece(0, 3, 5, 4, tensor_index=1)) == range(11, 13)
    assert as_slice(range(11, 13)) == slice(11, 13)


def test_a_piece_that_a_slice_cuts_is_a_mistake() -> None:
    (bucket,) = by_hand({"a": matrix(2, 4), "b": matrix(2, 4)}, [["a", "b"]])
    bucket.own = slice(0, 4)
    group = Group("stage", RANKS, 4, None, Recorder(4, NoEvents()))
    with pytest.raises(AssertionError, match="a piece is cut"):
        muon_messages(bucket, MuonGroup(group=group, exchange=EXCHANGE))
