# SPDX-License-Identifier: Apache-2.0
"""Every legal way to split a run over so many devices, as columns of numbers.

The complete space, before pins, of a world of N ranks is the product of four choices:

    mesh      tp, cp and pp are any divisors of N, dp what is left; ep any divisor of the experts;
              experts whole or cut over tp; sequence parallel or not; how context ranks meet; a
              microbatch of any divisor of a data rank's sequences. It makes a *row*.
    shares    ZeRO 0, or 1 to 3 with dp = dp_replicate x dp_shard in every way (`options.py`)
    order     every schedule, with every number of virtual stages up to MOST_VIRTUAL
    recompute none, or every 1st to MOST_RECOMPUTE_INTERVAL-th block

Degrees need not be powers of two, nor divide the layers. Bounds: a context rank has at least
_LEAST_TOKENS tokens of a sequence, a microbatch at most _MOST_TOKENS on a rank. "striped" is left
out where "ring" is legal: both send and compute the same. A pin lifts the bound on what it names.

No rule stands here: `Legality` gives the checks of `config/` the settings in question. Each choice
that one forbids is counted under the rule's id, where it is cut: a tensor degree once, a mesh with
its microbatch once. What an answer is made of is checked once more, as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from echelon.config.derived.context import cuts_groups, cuts_heads, cuts_sequence
from echelon.config.entries import Entry
from echelon.config.rules.experts import ep_divides_experts, expert_tp_divides_ffn
from echelon.config.rules.mesh import (
    sequence_parallel_divides_sequence,
    tp_divides_ffn,
    tp_divides_heads,
    tp_divides_kv_heads,
)
from echelon.config.rules.precision import fp8_gather
from echelon.config.rules.violations import ViolationFinder
from echelon.config.rules.zero import INT8_FINDERS
from echelon.config.view import View
from echelon.core.choices.context_kinds import (
    CONTEXT_KINDS,
    PLAIN_CONTEXT_KIND,
    context_kind_index,
    kinds_with_degree,
)
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.core.rulebook.experts import EP_DIVIDES_RANKS, TP_DIVIDES_TOKENS
from echelon.core.rulebook.mesh import (
    BATCH_DIVIDES,
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.rulebook.pipeline import LAYERS_FILL_STAGES
from echelon.core.rules import Rule
from echelon.planner.search.options import Rounding, divisors
from echelon.planner.search.pins import TENSOR_SEQUENCE_PARALLEL, Pins
from echelon.planner.search.request import SearchRequest

_TENSOR_CHECKS = (tp_divides_heads, tp_divides_kv_heads, tp_divides_ffn)
_CONTEXT_RULES: tuple[tuple[Callable[[View], bool], str], ...] = (
    (cuts_groups, ULYSSES_DIVIDES_CP.id),
    (cuts_heads, ULYSSES_DIVIDES_HEADS.id),
    (cuts_sequence, CONTEXT_DIVIDES_SEQUENCE.id),
)


class Legality:
    """Answer for one model and batch which degrees may be, with the rule where one may not."""

    def __init__(self, plan: Plan) -> None:
        """Keep what the checks read of the model and the batch."""
        model = asdict(plan.model)
        experts = cast("dict[str, object]", model.pop("experts") or {})
        values = {f"model.{key}": value for key, value in model.items() if value is not None}
        values |= {f"model.experts.{key}": value for key, value in experts.items()}
        precision = plan.mathematics.precision
        values["precision.matmul"] = precision.matmul
        values["precision.fp8_scales"] = precision.fp8_scales
        values["batch.sequence_length"] = plan.mathematics.sequence_length
        values["batch.global_sequences"] = plan.mathematics.global_sequences
        self._view = View(entries={k: Entry(value=v, source="") for k, v in values.items()})
        self.tensor = lru_cache(maxsize=None)(self._tensor)
        self.sequence = lru_cache(maxsize=None)(self._sequence)
        self.context = lru_cache(maxsize=None)(self._context)
        self.experts = lru_cache(maxsize=None)(self._experts)
        self.gather = lru_cache(maxsize=None)(self._gather)

    def _tensor(self, tp: int) -> str | None:
        """Return the rule that a tensor degree breaks."""
        return self._broken(_TENSOR_CHECKS, {"mesh.tp": tp})

    def _sequence(self, tp: int, cp: int) -> str | None:
        """Return the rule that sequence parallelism over so many ranks breaks."""
        settings = {"mesh.tp": tp, "mesh.cp": cp, "mesh.sequence_parallel": True}
        return self._broken((sequence_parallel_divides_sequence,), settings)

    def _context(self, tp: int, cp: int, kind: str, ulysses: int) -> str | None:
        """Return the rule that a way for context ranks to meet breaks."""
        degree = ulysses if kind in kinds_with_degree() else "auto"
        settings = {"mesh.tp": tp, "mesh.cp": cp, "context.kind": kind}
        view = self._with(settings | {"context.ulysses_degree": degree})
        return next((rule for holds, rule in _CONTEXT_RULES if not holds(view)), None)

    def _experts(self, tp: int, ep: int, expert_tp: int) -> str | None:
        """Return the rule that a way to share out experts breaks."""
        settings = {"mesh.tp": tp, "mesh.ep": ep, "experts.expert_tp": expert_tp}
        return self._broken((ep_divides_experts, expert_tp_divides_ffn), settings)

    def _gather(self, rounding: Rounding, tp: int, expert_tp: int, streams: bool) -> bool:
        """Return whether tensor ranks, with sequence parallelism or not, gather so at stage 3."""
        settings = {
            **{"zero.stage": 3, "zero.gather": rounding.gather},
            **{"zero.int8_block": rounding.int8_block or 1, "mesh.tp": tp},
            **{"experts.expert_tp": expert_tp, "mesh.sequence_parallel": streams},
        }
        return self._broken((*INT8_FINDERS, fp8_gather), settings) is None

    def _broken(
        self, checks: Iterable[ViolationFinder], settings: Mapping[str, object]
    ) -> str | None:
        view = self._with(settings)
        return next((one.broken_rule[0] for find in checks for one in find(view)), None)

    def _with(self, settings: Mapping[str, object]) -> View:
        entries = {key: Entry(value=value, source="") for key, value in settings.items()}
        return replace(self._view, entries={**self._view.entries, **entries})


_LEAST_TOKENS = 512  # tokens of a microbatch
_MOST_TOKENS = 131_072  # tokens of a microbatch

IntArray = NDArray[np.int64]
Columns = dict[str, IntArray]
"""One array for each name, all of one length: a table of choices."""

_SPLIT_NAMES = ("tp", "sequence_parallel", "cp", "kind", "ulysses", "ep", "expert_tp")
SplitNumbers = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalMeshes:
    """Hold the legal meshes of `world` ranks with a microbatch, and what which rule refused."""

    world: int
    columns: Columns
    refused: Counter[str] = field(default_factory=Counter[str])

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.columns["tp"])


def legal_meshes(request: SearchRequest, world: int, legal: Legality) -> LegalMeshes:
    """Return every legal mesh of `world` ranks with every microbatch."""
    refused: Counter[str] = Counter()
    splits = list(_splits(request, world, legal, refused))
    table = np.array(splits, dtype=np.int64).reshape(-1, len(_SPLIT_NAMES))
    columns = {name: table[:, index] for index, name in enumerate(_SPLIT_NAMES)}
    columns["split"] = np.arange(len(table), dtype=np.int64)
    columns = _with_pipeline(request, world, columns, refused)
    columns = _with_microbatch(request, columns, refused)
    if request.model.experts is not None:
        columns = _with_fitting_experts(request, columns, refused)
    return LegalMeshes(world=world, columns=columns, refused=refused)


def take_columns(columns: Columns, index: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
    """Return the rows of a table at `index`."""
    return {name: column[index] for name, column in columns.items()}


def _splits(
    request: SearchRequest, world: int, legal: Legality, refused: Counter[str]
) -> Iterator[SplitNumbers]:
    """Yield the choices that decide what a block computes and sends, but for the microbatch."""
    pins = request.pins
    length = request.mathematics.sequence_length
    for tp in divisors(world):
        if not pins.allows("tp", tp) or _refuse(refused, legal.tensor(tp)):
            continue
        for cp in divisors(world // tp):
            if not pins.allows("cp", cp):
                continue
            if cp > 1 and pins.values_of("cp") is None and length // cp < _LEAST_TOKENS:
                break
            ways = list(_context_options(pins, legal, tp, cp, refused))
            shares = list(_expert_options(request, legal, world, tp, cp, refused))
            for streams in (0, 1) if tp > 1 else (0,):
                if not pins.allows("sequence_parallel", streams):
                    continue
                if tp > 1 and not pins.allows(TENSOR_SEQUENCE_PARALLEL, streams):
                    continue
                if streams and ways and _refuse(refused, legal.sequence(tp, cp)):
                    continue
                for kind, ulysses in ways:
                    for ep, expert_tp in shares:
                        yield tp, streams, cp, kind, ulysses, ep, expert_tp


def _refuse(refused: Counter[str], rule: str | None) -> bool:
    if rule is not None:
        refused[rule] += 1
    return rule is not None


def _context_options(
    pins: Pins, legal: Legality, tp: int, cp: int, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield kind and Ulysses degree of each way in which context ranks can meet."""
    if cp == 1:
        if pins.allows("ulysses", 1):
            yield context_kind_index(PLAIN_CONTEXT_KIND), 1
        return
    found: set[str] = set()
    for kind, record in sorted(
        CONTEXT_KINDS.items(), key=lambda one: one[1].outdone_by is not None
    ):
        if record.outdone_by in found and pins.values_of("context") is None:
            continue
        inner = record.exchange == "inner"
        for degree in divisors(cp)[1:-1] if inner else (record.exchange_degree(cp, 1),):
            if not (pins.allows("context", kind) and pins.allows("ulysses", degree)):
                continue
            if not _refuse(refused, legal.context(tp, cp, kind, degree)):
                found.add(kind)
                yield context_kind_index(kind), degree


def _expert_options(
    request: SearchRequest, legal: Legality, world: int, tp: int, cp: int, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield ep and expert_tp of each way to share out experts over a replica of all data ranks."""
    if request.model.experts is None:
        if request.pins.allows("ep", 1) and request.pins.allows("expert_tp", 1):
            yield 1, 1
        return
    largest = Mesh(tp=tp, cp=cp, dp_shard=world // (tp * cp))
    for pieces in dict.fromkeys((1, tp)):
        if not request.pins.allows("expert_tp", pieces):
            continue
        most = largest.degree(*largest.expert_fold(expert_tp=pieces))
        for ep in divisors(request.model.experts.num_experts):
            if not request.pins.allows("ep", ep):
                continue
            if most % ep:
                refused[EP_DIVIDES_RANKS.id] += 1
            elif not _refuse(refused, legal.experts(tp, ep, pieces)):
                yield ep, pieces


def _with_pipeline(
    request: SearchRequest, world: int, splits: Columns, refused: Counter[str]
) -> Columns:
    """Return each split with each number of pipeline ranks, and the data ranks that are left."""
    ways = np.array(divisors(world), dtype=np.int64)
    rest = world // (splits["tp"] * splits["cp"])
    index, way = np.nonzero(rest[:, None] % ways[None, :] == 0)
    columns = take_columns(splits, index) | {"pp": ways[way]}
    columns["dp"] = rest[index] // columns["pp"]
    columns = _pinned(request.pins, columns, "pp", "dp")
    fits = columns["pp"] <= request.model.layers
    columns = _legal_rows(columns, fits, refused, LAYERS_FILL_STAGES)
    shared_out = request.mathematics.global_sequences % columns["dp"] == 0
    return _legal_rows(columns, shared_out, refused, BATCH_DIVIDES)


def _legal_rows(
    columns: Columns, legal: NDArray[np.bool_], refused: Counter[str], rule: Rule
) -> Columns:
    """Return the rows that a rule lets be, and count the others."""
    refused[rule.id] += int((~legal).sum())
    return take_columns(columns, legal)


def _with_microbatch(request: SearchRequest, columns: Columns, refused: Counter[str]) -> Columns:
    """Return each mesh with each size of a microbatch."""
    total = request.mathematics.global_sequences
    wanted = request.pins.values_of("microbatch")
    sizes = divisors(total) if wanted is None else tuple(int(size) for size in wanted)
    ways = np.array(sizes, dtype=np.int64)
    each = total // columns["dp"]
    even = each[:, None] % ways[None, :] == 0
    if wanted is None:
        length = request.mathematics.sequence_length
        even &= ways[None, :] * length <= np.maximum(length, _MOST_TOKENS) * columns["cp"][:, None]
    else:
        refused[BATCH_DIVIDES.id] += int((~even).sum())
    index, way = np.nonzero(even)
    found = take_columns(columns, index) | {"microbatch": ways[way]}
    return found | {"microbatches": each[index] // found["microbatch"]}


def _with_fitting_experts(
    request: SearchRequest, columns: Columns, refused: Counter[str]
) -> Columns:
    """Return the rows whose ranks have room for their experts, and route equal parts."""
    room = expert_fold_degrees(columns, columns["dp"]) % columns["ep"] == 0
    columns = _legal_rows(columns, room, refused, EP_DIVIDES_RANKS)
    tokens = columns["microbatch"] * (request.mathematics.sequence_length // columns["cp"])
    equal = (tokens % columns["tp"] == 0) | (columns["sequence_parallel"] == 1)
    return _legal_rows(columns, equal, refused, TP_DIVIDES_TOKENS)


def expert_fold_degrees(columns: Columns, dp_shard: IntArray) -> IntArray:
    """Return among how many ranks experts are shared out, with so many shards: an array."""
    whole = columns["expert_tp"] == 1
    return dp_shard * columns["cp"] * np.where(whole, columns["tp"], 1)


def _pinned(pins: Pins, columns: Columns, *names: str) -> Columns:
    for name in names:
        wanted = pins.values_of(name)
        if wanted is not None:
            columns = take_columns(columns, np.isin(columns[name], [int(one) for one in wanted]))
    return columns
