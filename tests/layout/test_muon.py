"""Muon's exchange: every matrix once, every piece in its place, nothing sent for nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings

from echelon.core.axis import SHARD_AXES, Axis
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer, Plan, ZeroStage
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis, bytes_sent_without_muon
from echelon.cost.bytes.terms import SentTerm
from echelon.layout.buckets import plan_buckets, shard_degree, slice_elements
from echelon.layout.muon import (
    MuonExchange,
    MuonMatrix,
    MuonPiece,
    muon_elements,
    muon_exchange,
    newton_schulz_flops,
)
from echelon.layout.slots import slot_ranges
from echelon.layout.stage import held_parameters, rank_part, update_rule_of
from tests.cost.layouts import MIXED, zero_plan, zero_plans
from tests.parallel.layouts import NANO
from tests.walks import examples

MUON = zero_plans(optimizers=("muon",))


def exchanges(plan: Plan) -> list[MuonExchange]:
    """Return the exchange of every stage."""
    return [muon_exchange(plan, stage) for stage in range(plan.num_stages)]


@given(MUON)
@settings(deadline=None, max_examples=examples(60))
def test_every_matrix_has_one_owner_of_its_stage(plan: Plan) -> None:
    for stage, exchange in enumerate(exchanges(plan)):
        specs = held_parameters(plan, rank_part(plan, stage))
        optimizer = plan.mathematics.optimizer
        wanted = [spec.name for spec in specs if update_rule_of(optimizer, spec) == "muon"]
        assert sorted(matrix.name for matrix in exchange.matrices) == sorted(wanted)
        ranks = [
            rank
            for rank in range(plan.mesh.world_size)
            if plan.mesh.coordinates(rank)[Axis.PP] == stage
        ]
        assert list(exchange.ranks) == ranks
        assert {matrix.owner for matrix in exchange.matrices} <= {*ranks}
        owned = [matrix for rank in ranks for matrix in exchange.owned(rank)]
        assert len(owned) == len(exchange.matrices)


@given(MUON)
@settings(deadline=None, max_examples=examples(60))
def test_work_is_shared_out_evenly(plan: Plan) -> None:
    for exchange in exchanges(plan):
        load: Counter[int] = Counter(dict.fromkeys(exchange.ranks, 0))
        for matrix in exchange.matrices:
            load[matrix.owner] += newton_schulz_flops(matrix.shape, 5)
        most = max(newton_schulz_flops(matrix.shape, 5) for matrix in exchange.matrices)
        assert max(load.values()) - min(load.values()) <= most


@given(MUON)
@settings(deadline=None, max_examples=examples(60))
def test_pieces_cover_each_matrix_and_have_one_sender_near_the_owner(plan: Plan) -> None:
    for exchange in exchanges(plan):
        for matrix in exchange.matrices:
            replicas = plan.mesh.dp_replicate if plan.layout.zero.stage else plan.mesh.dp
            copies = replicas * (plan.mesh.tp if matrix.split_dim is None else 1)
            if plan.layout.zero.stage == 0:
                copies *= plan.mesh.cp
            here = plan.mesh.coordinates(matrix.owner)
            by_tensor: dict[int, list[MuonPiece]] = {}
            for piece in matrix.pieces:
                by_tensor.setdefault(piece.tensor_index, []).append(piece)
                assert piece.sender in piece.holders
                assert len(set(piece.holders)) == len(piece.holders) == copies
                # What the owner holds it takes from itself.
                assert (matrix.owner in piece.holders) == (piece.sender == matrix.owner)
                sender = plan.mesh.coordinates(piece.sender)
                assert sender[Axis.DP_REPLICATE] == here[Axis.DP_REPLICATE]
            assert len(by_tensor) == (1 if matrix.split_dim is None else plan.mesh.tp)
            for pieces in by_tensor.values():
                assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
                assert pieces[-1].stop == prod(matrix.local_shape)


def anywhere(term: SentTerm) -> SentTerm:
    """The term of any rank: its bytes to other nodes, and their name, depend on the rank."""
    return replace(term, far=0, name=term.name.removesuffix(", to other nodes"))


@pytest.mark.slow
@given(MUON)
@settings(deadline=None, max_examples=examples(40))
def test_what_is_sent_arrives(plan: Plan) -> None:
    """The elements that ranks send are those that others lack, and the terms count them."""
    size = {"fp32": 4, "fp64": 8}[plan.mathematics.precision.master]
    for stage, exchange in enumerate(exchanges(plan)):
        pieces = results = 0
        for matrix in exchange.matrices:
            for piece in matrix.pieces:
                lacks = matrix.owner not in piece.holders
                pieces += lacks * piece.num_elements
                results += (len(piece.holders) - (not lacks)) * piece.num_elements
        sent = [muon_elements(exchange, rank) for rank in exchange.ranks]
        assert [sum(column) for column in zip(*sent, strict=True)] == [pieces, results]
        for rank, both in zip(exchange.ranks, sent, strict=True):
            assert bytes_sent_by_axis(plan, rank).get("stage", 0) == sum(both) * size
            others = [t for t in bytes_sent(plan, rank) if t.axis != "stage"]
            cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
            without = bytes_sent_without_muon(plan, stage, cp_rank)
            assert [anywhere(term) for term in others] == [anywhere(term) for term in without]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("dp", "dp_shard", "tp"), [(1, 1, 1), (2, 2, 1), (1, 3, 2), (2, 2, 2)])
def test_the_exchange_gives_every_rank_its_part_of_what_one_device_computes(
    stage: ZeroStage, dp: int, dp_shard: int, tp: int
) -> None:
    plan = zero_plan(stage, dp=dp, dp_shard=dp_shard, tp=tp, pp=2, optimizer="muon")
    for number in range(2):
        ring = _Stage(plan, number)
        ring.exchange()
        ring.check()


class _Stage:
    """The ranks of one stage, each with its slices of buckets, run in one process."""

    def __init__(self, plan: Plan, stage: int) -> None:
        self.plan, self.plans = plan, muon_exchange(plan, stage)
        part = rank_part(plan, stage)
        self.specs = {spec.name: spec for spec in held_parameters(plan, part)}
        self.buckets = [b for b in plan_buckets(plan, part) if b.update == "muon"]
        random = np.random.default_rng(stage)
        self.whole = {
            matrix.name: random.standard_normal(matrix.shape) for matrix in self.plans.matrices
        }
        self.slices = {rank: self._cut(rank, self.whole) for rank in self.plans.ranks}

    def _cut(self, rank: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the slices that a rank holds of buckets of the given matrices."""
        here, mesh = self.plan.mesh.coordinates(rank), self.plan.mesh
        index = 0
        for axis in SHARD_AXES:
            index = index * mesh.degree(axis) + here[axis]
        found: dict[str, np.ndarray] = {}
        for bucket in self.buckets:
            flat = np.zeros(bucket.num_elements)
            for slot in slot_ranges(self.plan, bucket, self.specs):
                local = _tensor_slice(values[slot.spec.name], slot.spec, mesh.tp, here[Axis.TP])
                flat[slot.start : slot.stop] = local.reshape(-1)
            size = slice_elements(self.plan, bucket)
            own = index if shard_degree(self.plan) > 1 else 0
            found[bucket.name] = flat[own * size : (own + 1) * size].copy()
        return found

    def _view(self, rank: int, piece: MuonPiece) -> np.ndarray:
        """Return the elements of a piece in the slice of a rank that holds it."""
        flat = self.slices[rank][piece.bucket]
        start = piece.bucket_start % len(flat)
        return flat[start : start + piece.num_elements]

    def exchange(self) -> None:
        """Let each owner gather its matrices, compute, and give the results back."""
        results: list[tuple[MuonMatrix, list[np.ndarray]]] = []
        for matrix in self.plans.matrices:
            count = 1 if matrix.split_dim is None else self.plan.mesh.tp
            locals_ = [np.zeros(prod(matrix.local_shape)) for _ in range(count)]
            for piece in matrix.pieces:
                locals_[piece.tensor_index][piece.start : piece.stop] = self._view(
                    piece.sender, piece
                )
            shaped = [flat.reshape(matrix.local_shape) for flat in locals_]
            x = np.concatenate(shaped, axis=matrix.split_dim or 0)
            parts = np.split(_iterate(x), count, axis=matrix.split_dim or 0)
            results.append((matrix, [np.ascontiguousarray(part).reshape(-1) for part in parts]))
        for matrix, parts in results:
            for piece in matrix.pieces:
                for holder in piece.holders:
                    part = parts[piece.tensor_index]
                    self._view(holder, piece)[:] = part[piece.start : piece.stop]

    def check(self) -> None:
        """Compare the slices of each rank with those of the matrices that one device has."""
        wanted = {name: _iterate(x) for name, x in self.whole.items()}
        for rank in self.plans.ranks:
            for name, flat in self._cut(rank, wanted).items():
                np.testing.assert_array_equal(self.slices[rank][name], flat)


def _iterate(x: np.ndarray) -> np.ndarray:
    """Return something of which every element needs elements of all rows and columns."""
    return x + x.sum(axis=0, keepdims=True) * x.sum(axis=1, keepdims=True)


def _tensor_slice(x: np.ndarray, spec: ParameterSpec, tp: int, index: int) -> np.ndarray:
    return x if spec.split_dim is None else np.split(x, tp, axis=spec.split_dim)[index]


def test_one_rank_sends_nothing() -> None:
    assert "stage" not in bytes_sent_by_axis(zero_plan(0, optimizer="muon"), 0)


def test_two_ranks_by_hand() -> None:
    """Two data ranks at stage 1, one block: whoever owns a matrix gets the half that it lacks."""
    model = replace(NANO, layers=1)
    plan = zero_plan(
        1, dp_shard=2, model=model, optimizer="muon", precision=MIXED, bucket_bytes=2**20
    )
    exchange = muon_exchange(plan, 0)
    matrices = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 24 * 16
    lacking = {0: 0, 1: 0}
    for matrix in exchange.matrices:
        for piece in matrix.pieces:
            lacking[piece.sender] += piece.num_elements if piece.sender != matrix.owner else 0
    assert sum(p.num_elements for m in exchange.matrices for p in m.pieces) == matrices
    for rank in (0, 1):
        pieces, results = muon_elements(exchange, rank)
        assert pieces == lacking[rank]
        # What came from the other goes back to it, and nothing else: each element has one holder.
        assert results == lacking[1 - rank]
        found = {t.name: t.bytes for t in bytes_sent(plan, rank) if t.axis == "stage"}
        wanted = {"pieces of matrices": 4 * pieces, "orthogonal matrices": 4 * results}
        assert found == {name: number for name, number in wanted.items() if number}


def test_newton_schulz_flops_of_both_orientations() -> None:
    step = 2 * 8 * 8 * 24 + 2 * 8 * 8 * 8 + 2 * 8 * 8 * 24
    assert newton_schulz_flops((24, 8), 5) == newton_schulz_flops((8, 24), 5) == 5 * step


def test_the_owner_is_one_that_holds_much_of_the_matrix() -> None:
    plan = zero_plan(1, dp_shard=2, optimizer="muon", model=replace(NANO, layers=2))
    first = max(muon_exchange(plan, 0).matrices, key=lambda m: newton_schulz_flops(m.shape, 5))
    own = sum(p.num_elements for p in first.pieces if p.sender == first.owner)
    assert 2 * own >= prod(first.shape)
    assert plan.mathematics.optimizer == Optimizer(kind="muon")
