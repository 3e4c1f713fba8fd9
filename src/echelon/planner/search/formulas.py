# SPDX-License-Identifier: Apache-2.0
"""The formulas of `cost/seconds/` over the rows of a search, blocks once for each shard.

What a block takes depends on a mesh and its microbatch only up to what pipeline and data ranks
make of it, so thousands of rows share a few hundred blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.core.choices.collective_algorithms import algorithm_index
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.cost.activations.closed_forms import BlockKindBytes, block_kind_bytes
from echelon.cost.inputs.cost_inputs import CostInputs, Terms
from echelon.cost.inputs.numbers import Array, LayoutNumbers, Num
from echelon.cost.peak.fullest_rank import PipelineEnds, pipeline_ends
from echelon.cost.seconds.block import block_seconds, end_seconds
from echelon.cost.seconds.collectives import automatic_algorithm
from echelon.cost.seconds.from_plan import adapted_model_numbers
from echelon.cost.seconds.step import BlockKindSeconds, block_kind_seconds, step_seconds
from echelon.cost.seconds.trainers import OURS
from echelon.interop.tools import abilities_of_trainer
from echelon.planner.predict.estimate import closed_form_bytes
from echelon.planner.search.legal_meshes import Columns, Legality, LegalMeshes, expert_fold_degrees
from echelon.planner.search.options import (
    EXACT,
    ONE_NODE,
    ROUNDED_NUMBERS,
    NodeOfRanks,
    Rounding,
    ScheduleOption,
    ZeroOption,
    pinned_zero_options,
    recompute_options,
    rounding_options,
    schedule_options,
)
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.run_settings import algorithm_asked_for

_OF_BYTES = ("tp", "cp", "kind", "ulysses", "expert_tp", "sequence_parallel", "microbatch")
"""Columns of meshes on which the bytes that a block keeps depend: on fewer than its seconds."""

_OPERATORS = ("selective", "redone_norm", "redone_activation", "redone_mlp")
"""Fields of `LayoutNumbers` that say which operators run again."""

Record = TypeVar("Record")
RowIndex = NDArray[np.int64]

OF_BLOCKS = (
    *("tp", "cp", "ep", "expert_tp", "sequence_parallel", "ulysses", "gathered", "microbatch"),
)
"""Fields of `LayoutNumbers` on which the seconds of a block depend, of those that are searched."""


def searched_sums(request: SearchRequest) -> float:
    """Return the index of how plans of a search sum gradients, where their groups fit it."""
    if request.trainer != OURS:
        return 0.0
    asked = algorithm_asked_for(request.layers)
    chosen = automatic_algorithm(request.cluster)[0] if asked is None else str(asked.value)
    return float(algorithm_index(chosen))


class VectorizedFormulas:
    """Give seconds and bytes of rows of a search, with what else a plan needs as arrays."""

    def __init__(self, request: SearchRequest, rows: LegalMeshes) -> None:
        """Keep the rows as the numbers that the formulas read."""
        self._request = request
        found = rows.columns
        names = (*OF_BLOCKS[:-2], "pp", "microbatch", "microbatches")
        self.columns: dict[str, Array] = {name: found[name].astype(float) for name in names}
        at_once = [i for i, one in enumerate(CONTEXT_KINDS.values()) if one.gathers_keys]
        gathered = np.isin(found["kind"], at_once)
        self.columns["gathered"] = gathered.astype(float)
        self._machine = request.machine_numbers(rows.world)
        # Rows of one split with one microbatch have the same blocks.
        self._first, self._shard = rows_alike([found["split"], found["microbatch"]])
        first, kept = rows_alike([found[name][self._first] for name in _OF_BYTES])
        self._first_kept, self._kept = self._first[first], kept[self._shard]
        self._blocks: BlockKindSeconds | None = None
        self._block_bytes: dict[tuple[float, ...], BlockKindBytes] = {}
        self._known: RowIndex = np.full(len(self._first), -1, dtype=np.int64)
        """Where the seconds of the blocks of a shard stand; -1 where nobody has asked."""

    def prepare(self, index: RowIndex) -> None:
        """Compute the blocks of these rows, once for all that share them."""
        wanted = np.unique(self._shard[index])
        new = wanted[self._known[wanted] < 0]
        if not len(new):
            return
        shards = np.flatnonzero(self._known >= 0)
        shards = np.concatenate([shards, new])
        self._blocks = self._block_seconds(self._first[shards])
        self._known[shards] = np.arange(len(shards))

    def _block_seconds(self, index: RowIndex) -> BlockKindSeconds:
        """Return the seconds of the blocks of rows; how experts are shared out, dense ones do not
        depend on, nor the ends of a model."""
        if self._request.model.experts is None:
            return block_kind_seconds(self._work(LayoutNumbers(**self._of_blocks(index))))
        _, first, which = np.unique(self._kept[index], return_index=True, return_inverse=True)
        few = self._work(LayoutNumbers(**self._of_blocks(index[first])))
        every = self._work(LayoutNumbers(**self._of_blocks(index)))
        return BlockKindSeconds(
            dense=take_nested_entries(block_seconds(few, mixture=False), which),
            experts=block_seconds(every, mixture=True),
            ends=take_nested_entries(end_seconds(few), which),
        )

    def seconds(self, index: RowIndex, **rest: Num) -> Terms:
        """Return the seconds of prepared rows at `index`; `rest` are fields of LayoutNumbers."""
        assert self._blocks is not None
        blocks = take_nested_entries(self._blocks, self._known[self._shard[index]])
        return step_seconds(self._at(index, rest), blocks)

    def bytes(self, index: RowIndex, ends: PipelineEnds | None = None, **rest: Num) -> Terms:
        """Return the bytes of rows at `index`; `rest` are fields of LayoutNumbers."""
        again = {name: rest.get(name, 0.0) for name in _OPERATORS}
        blocks = None
        if not any(np.ndim(value) for value in again.values()):
            known = self._block_bytes_with({name: float(value) for name, value in again.items()})
            blocks = take_nested_entries(known, self._kept[index])
        return closed_form_bytes(self._at(index, rest), self._request.trainer, blocks, ends)

    def ends(self, index: RowIndex, **rest: Num) -> PipelineEnds:
        """Return what the bytes of rows have in common whatever recompute and ZeRO stage are."""
        return pipeline_ends(self._at(index, rest))

    def _block_bytes_with(self, again: Mapping[str, float]) -> BlockKindBytes:
        """Return the bytes of all blocks that differ, with the operators that run again."""
        key = tuple(again.values())
        if key not in self._block_bytes:
            work = self._work(LayoutNumbers(**self._of_blocks(self._first_kept), **again))
            self._block_bytes[key] = block_kind_bytes(work)
        return self._block_bytes[key]

    def _of_blocks(self, index: RowIndex) -> dict[str, Any]:
        """Return the numbers on which the blocks of rows depend, as fields of LayoutNumbers."""
        return {name: self.columns[name][index] for name in OF_BLOCKS}

    def _at(self, index: RowIndex, rest: dict[str, Num]) -> CostInputs:
        layout: dict[str, Any] = {name: column[index] for name, column in self.columns.items()}
        layout["sums"] = searched_sums(self._request)
        return self._work(LayoutNumbers(**layout | rest))

    def _work(self, layout: LayoutNumbers) -> CostInputs:
        request = self._request
        length = request.mathematics.sequence_length
        return CostInputs(
            model=adapted_model_numbers(request.model, length, tp=layout.tp),
            machine=self._machine,
            software=request.software,
            layout=layout,
        )


def rows_alike(columns: Sequence[RowIndex]) -> tuple[RowIndex, RowIndex]:
    """Return the first row of each kind, and the kind of each row, by columns of whole numbers."""
    joined = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        joined = joined * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(joined, return_index=True, return_inverse=True)
    return first, which


def take_nested_entries(record: Record, index: RowIndex) -> Record:
    """Return a record of records with every array in it replaced by its entries at `index`."""
    done: dict[int, Any] = {}
    changed: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        value: Any = getattr(record, item.name)
        if id(value) in done:
            changed[item.name] = done[id(value)]
        elif hasattr(value, "__dataclass_fields__"):
            changed[item.name] = done[id(value)] = take_nested_entries(value, index)
        elif np.ndim(value):
            changed[item.name] = done[id(value)] = value[index]
    return replace(record, **changed)  # type: ignore[type-var]


def broadcast_to_array(value: Num, count: int) -> Array:
    """Return a quantity as an array of `count` numbers, also where it is the same for all."""
    return np.broadcast_to(np.asarray(value, dtype=float), (count,))


OptionT = TypeVar("OptionT", ZeroOption, ScheduleOption)
_ZERO_OPTION_NUMBERS = ("zero", "dp_replicate", "dp_shard", "reshard", "offload")
_RARE_NUMBERS = ("secondary", *ROUNDED_NUMBERS)
"""Numbers of ways to share out that are 0 for all of them in most searches, and left out there."""
_OF_NODES: tuple[str, ...] = ("pp", "tp", "expert_tp", "sequence_parallel")
"""Columns on which the ways to share out depend, too, where ranks are on several nodes."""
_SCHEDULE_OPTION_NUMBERS = ("schedule", "virtual")


@dataclass(slots=True)
class OptionTable(Generic[OptionT]):
    """Hold the choices of some rows one after the other: `row` says whose each is."""

    row: RowIndex
    options: Sequence[OptionT]
    option_index: RowIndex
    numbers: dict[str, Array]
    fits: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def kept(self, wanted: NDArray[np.bool_]) -> OptionTable[OptionT]:
        """Return the choices where `wanted` is true, in their order."""
        return OptionTable(
            row=self.row[wanted],
            options=self.options,
            option_index=self.option_index[wanted],
            numbers={name: column[wanted] for name, column in self.numbers.items()},
        )

    def option_at(self, place: int) -> OptionT:
        """Return the choice that stands at a place."""
        return self.options[int(self.option_index[place])]


class OptionTables:
    """Give the choices of the rows of one world size."""

    def __init__(self, request: SearchRequest, *, offload: bool) -> None:
        """Make the lists that are the same for all rows."""
        pins = request.pins
        self._request = request
        self._offload = offload or pins.values_of("offload") == (1,)
        self.recomputes = recompute_options(request)
        self._legality = Legality(request.one_rank_run)
        self.columns: Columns = {}
        self.world = 0

    @property
    def offloads(self) -> float:
        """Return 1 where optimizer state rests in the memory of hosts."""
        return float(self._offload)

    @property
    def recompute_ends(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the least and the most that runs forward again, as fields of LayoutNumbers."""
        return self.recomputes[0].numbers, self.recomputes[-1].numbers

    def set_meshes(self, rows: LegalMeshes) -> None:
        """Make the lists of these rows, each once for all rows that share it."""
        self.columns = columns = rows.columns
        self.world = rows.world
        inner = expert_fold_degrees(columns, np.ones(len(rows), dtype=np.int64))
        keys = [columns["dp"], columns["cp"], columns["ep"], inner]
        pins, layers = self._request.pins, self._request.model.layers
        able = abilities_of_trainer(self._request.trainer)
        roundings = rounding_options(pins, self._request.mathematics.precision)
        nodes = able is None and rows.world > self._request.cluster.devices_per_node
        if able is not None or nodes or roundings != (EXACT,):
            keys += [columns[name] for name in _OF_NODES]

        def shares(key: tuple[int, ...]) -> list[ZeroOption]:
            rest = dict(zip(_OF_NODES, key[4:], strict=False))
            found = pinned_zero_options(
                pins,
                key[:4],
                offload=self._offload,
                node=self._node(key, rest) if nodes else ONE_NODE,
                roundings=[one for one in roundings if one == EXACT or self._rounds(one, rest)],
            )
            if able is None:
                return [*found]
            degrees = {"cp": key[1], "pp": rest["pp"], "tp": rest["tp"]}
            return [
                one
                for one in found
                if able.allows_zero(
                    one.zero, dp_replicate=one.dp_replicate, dp_shard=one.dp_shard, **degrees
                )
            ]

        def orders(key: tuple[int, ...]) -> list[ScheduleOption]:
            pp, microbatches = key
            found = [one for one in schedule_options(pins, pp, layers) if one.allows(microbatches)]
            if able is None:
                return found
            return [
                one
                for one in found
                if able.allows_schedule(one.name, pp=pp, microbatches=microbatches)
                and able.allows_stages(layers=layers, stages=one.virtual * pp)
            ]

        self._shares: _SharedLists[ZeroOption] = _SharedLists(
            keys, shares, (*_ZERO_OPTION_NUMBERS, *_RARE_NUMBERS)
        )
        self._orders: _SharedLists[ScheduleOption] = _SharedLists(
            (columns["pp"], columns["microbatches"]), orders, _SCHEDULE_OPTION_NUMBERS
        )

    def _node(self, key: tuple[int, ...], rest: Mapping[str, int]) -> NodeOfRanks:
        """Return the node that the ranks of some rows are on."""
        stride = key[2] * rest["expert_tp"] if self._request.model.experts is not None else 0
        devices = self._request.cluster.devices_per_node
        return NodeOfRanks(devices=devices, tp=rest["tp"], expert_stride=stride)

    def _rounds(self, rounding: Rounding, rest: Mapping[str, int]) -> bool:
        """Return whether rules let some rows gather as `rounding` says, at stage 3."""
        return self._legality.gather(
            rounding, rest["tp"], rest["expert_tp"], bool(rest["sequence_parallel"])
        )

    def num_plans(self) -> NDArray[np.int64]:
        """Return how many plans each row stands for."""
        return self._shares.counts() * self._orders.counts() * len(self.recomputes)

    def zero_options(self, rows: RowIndex) -> OptionTable[ZeroOption]:
        """Return the ways to share out of some rows."""
        return self._shares.table(rows)

    def schedule_options(self, rows: RowIndex) -> OptionTable[ScheduleOption]:
        """Return the orders of some rows."""
        return self._orders.table(rows)

    @staticmethod
    def pairs(
        num_rows: int, shares: OptionTable[ZeroOption], orders: OptionTable[ScheduleOption]
    ) -> tuple[RowIndex, RowIndex]:
        """Return every way to share out of a row with every order of the same row."""
        per_share = np.bincount(shares.row, minlength=num_rows)
        per_order = np.bincount(orders.row, minlength=num_rows)
        each = per_share * per_order
        row = np.repeat(np.arange(num_rows), each)
        place = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        share = (np.cumsum(per_share) - per_share)[row] + place // per_order[row]
        order = (np.cumsum(per_order) - per_order)[row] + place % per_order[row]
        return share, order


class _SharedLists(Generic[OptionT]):
    """Hold the list of choices of each row; rows with the same key share one."""

    def __init__(
        self,
        keys: Sequence[NDArray[np.int64]],
        make: Callable[[tuple[int, ...]], Sequence[OptionT]],
        names: Sequence[str],
    ) -> None:
        first, self._which = rows_alike(keys)
        self._kinds: list[OptionT] = []
        starts = [0]
        for place in first:
            self._kinds.extend(make(tuple(int(key[place]) for key in keys)))
            starts.append(len(self._kinds))
        self._start = np.array(starts[:-1], dtype=np.int64)
        self._count = np.diff(np.array(starts, dtype=np.int64))
        numbers = {
            name: np.array([getattr(kind, name) for kind in self._kinds], dtype=float)
            for name in names
        }
        self._numbers: dict[str, Array] = {
            name: column
            for name, column in numbers.items()
            if name not in _RARE_NUMBERS or column.any()
        }

    def counts(self) -> NDArray[np.int64]:
        """Return how many choices each row has."""
        return self._count[self._which]

    def table(self, rows: RowIndex) -> OptionTable[OptionT]:
        """Return the choices of some rows."""
        which = self._which[rows]
        count = self._count[which]
        row = np.repeat(np.arange(len(rows)), count)
        place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        kind = self._start[which][row] + place
        numbers = {name: column[kind] for name, column in self._numbers.items()}
        return OptionTable(row=row, options=self._kinds, option_index=kind, numbers=numbers)
