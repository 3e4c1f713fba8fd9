"""Every legal way to split a run over so many devices, as columns of numbers.

The complete space, before pins, of a world of N ranks is the product of four choices:

    mesh      tp, cp and pp are any divisors of N, dp what is left; ep any divisor of the experts;
              experts whole or cut over tp; sequence parallel or not; how context ranks meet; a
              microbatch of any divisor of a data rank's sequences. It makes a *row*.
    shares    ZeRO 0, or 1 to 3 with dp = dp_replicate x dp_shard in every way (`choices.py`)
    order     every schedule, with every number of virtual stages up to MOST_VIRTUAL
    recompute none, or every 1st to MOST_APART-th block

Degrees need not be powers of two, nor divide the layers. Bounds: a context rank has at least
LEAST_TOKENS tokens of a sequence, a microbatch at most MOST_TOKENS on a rank. "striped" is left out
where "ring" is legal: both send and compute the same. A pin lifts the bound on what it names.

Each choice that a rule forbids is counted under the rule's id, where it is cut: a tensor degree
once, a mesh with its microbatch once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echelon.core.mesh import Mesh
from echelon.core.rulebook.batch import BATCH_DIVIDES
from echelon.core.rulebook.expert_parallel import EP_DIVIDES_RANKS, TP_DIVIDES_TOKENS
from echelon.core.rulebook.pipeline import LAYERS_FILL_STAGES
from echelon.core.rules import nearest_divisors
from echelon.planner.legal import Legality, folded_degree
from echelon.planner.pins import CONTEXT_KINDS, Pins
from echelon.planner.request import Request

LEAST_TOKENS = 512
MOST_TOKENS = 131_072

Whole = NDArray[np.int64]
Columns = dict[str, Whole]
"""One array for each name, all of one length: a table of choices."""

SPLIT_NAMES = ("tp", "sequence_parallel", "cp", "kind", "ulysses", "ep", "expert_tp")
Split = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Hold the legal meshes of `world` ranks with a microbatch, and what which rule refused."""

    world: int
    columns: Columns
    refused: Counter[str] = field(default_factory=Counter[str])

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.columns["tp"])


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in rising order."""
    return nearest_divisors(number, 1, limit=number)


def legal_rows(request: Request, world: int, legal: Legality) -> Rows:
    """Return every legal mesh of `world` ranks with every microbatch."""
    refused: Counter[str] = Counter()
    splits = list(_splits(request, world, legal, refused))
    table = np.array(splits, dtype=np.int64).reshape(-1, len(SPLIT_NAMES))
    columns = {name: table[:, index] for index, name in enumerate(SPLIT_NAMES)}
    columns["split"] = np.arange(len(table), dtype=np.int64)
    columns = _with_pipeline(request, world, columns, refused)
    columns = _with_microbatch(request, columns, refused)
    if request.model.experts is not None:
        columns = _with_fitting_experts(request, columns, refused)
    return Rows(world=world, columns=columns, refused=refused)


def taken(columns: Columns, index: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
    """Return the rows of a table at `index`."""
    return {name: column[index] for name, column in columns.items()}


def _splits(
    request: Request, world: int, legal: Legality, refused: Counter[str]
) -> Iterator[Split]:
    """Yield the choices that decide what a block computes and sends, but for the microbatch."""
    pins = request.pins
    length = request.mathematics.sequence_length
    for tp in divisors(world):
        if not pins.allow("tp", tp) or _refuse(refused, legal.tensor(tp)):
            continue
        for cp in divisors(world // tp):
            if not pins.allow("cp", cp):
                continue
            if cp > 1 and pins.of("cp") is None and length // cp < LEAST_TOKENS:
                break
            ways = list(_ways_to_meet(pins, legal, tp, cp, refused))
            shares = list(_expert_shares(request, legal, world, tp, cp, refused))
            for streams in (0, 1) if tp > 1 else (0,):
                if not pins.allow("sequence_parallel", streams):
                    continue
                if tp > 1 and not pins.allow("split_streams", streams):
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


def _ways_to_meet(
    pins: Pins, legal: Legality, tp: int, cp: int, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield kind and Ulysses degree of each way in which context ranks can meet."""
    if cp == 1:
        if pins.allow("ulysses", 1):
            yield CONTEXT_KINDS.index("ring"), 1
        return
    rings = False
    for kind in ("ring", "gathered", "ulysses", "ulysses-ring", "striped"):
        if kind == "striped" and rings and pins.of("context") is None:
            continue
        degrees = {"ulysses": (cp,), "ulysses-ring": divisors(cp)[1:-1]}.get(kind, (1,))
        for degree in degrees:
            if not (pins.allow("context", kind) and pins.allow("ulysses", degree)):
                continue
            if not _refuse(refused, legal.context(tp, cp, kind, degree)):
                rings = rings or kind == "ring"
                yield CONTEXT_KINDS.index(kind), degree


def _expert_shares(
    request: Request, legal: Legality, world: int, tp: int, cp: int, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield ep and expert_tp of each way to share out experts over a replica of all data ranks."""
    if request.model.experts is None:
        if request.pins.allow("ep", 1) and request.pins.allow("expert_tp", 1):
            yield 1, 1
        return
    largest = Mesh(tp=tp, cp=cp, dp_shard=world // (tp * cp))
    for pieces in dict.fromkeys((1, tp)):
        if not request.pins.allow("expert_tp", pieces):
            continue
        most = folded_degree(largest, pieces)
        for ep in divisors(request.model.experts.num_experts):
            if not request.pins.allow("ep", ep):
                continue
            if most % ep:
                refused[EP_DIVIDES_RANKS.id] += 1
            elif not _refuse(refused, legal.experts(tp, ep, pieces)):
                yield ep, pieces


def _with_pipeline(request: Request, world: int, splits: Columns, refused: Counter[str]) -> Columns:
    """Return each split with each number of pipeline ranks, and the data ranks that are left."""
    ways = np.array(divisors(world), dtype=np.int64)
    rest = world // (splits["tp"] * splits["cp"])
    index, way = np.nonzero(rest[:, None] % ways[None, :] == 0)
    columns = taken(splits, index) | {"pp": ways[way]}
    columns["dp"] = rest[index] // columns["pp"]
    columns = _pinned(request.pins, columns, "pp", "dp")
    fits = columns["pp"] <= request.model.layers
    refused[LAYERS_FILL_STAGES.id] += int((~fits).sum())
    columns = taken(columns, fits)
    shared_out = request.mathematics.global_sequences % columns["dp"] == 0
    refused[BATCH_DIVIDES.id] += int((~shared_out).sum())
    return taken(columns, shared_out)


def _with_microbatch(request: Request, columns: Columns, refused: Counter[str]) -> Columns:
    """Return each mesh with each size of a microbatch."""
    total = request.mathematics.global_sequences
    wanted = request.pins.of("microbatch")
    sizes = divisors(total) if wanted is None else tuple(int(size) for size in wanted)
    ways = np.array(sizes, dtype=np.int64)
    each = total // columns["dp"]
    even = each[:, None] % ways[None, :] == 0
    if wanted is None:
        length = request.mathematics.sequence_length
        even &= ways[None, :] * length <= np.maximum(length, MOST_TOKENS) * columns["cp"][:, None]
    else:
        refused[BATCH_DIVIDES.id] += int((~even).sum())
    index, way = np.nonzero(even)
    found = taken(columns, index) | {"microbatch": ways[way]}
    return found | {"microbatches": each[index] // found["microbatch"]}


def _with_fitting_experts(request: Request, columns: Columns, refused: Counter[str]) -> Columns:
    """Return the rows whose ranks have room for their experts, and route equal parts."""
    room = fold_of(columns, columns["dp"]) % columns["ep"] == 0
    refused[EP_DIVIDES_RANKS.id] += int((~room).sum())
    columns = taken(columns, room)
    tokens = columns["microbatch"] * (request.mathematics.sequence_length // columns["cp"])
    equal = (tokens % columns["tp"] == 0) | (columns["sequence_parallel"] == 1)
    refused[TP_DIVIDES_TOKENS.id] += int((~equal).sum())
    return taken(columns, equal)


def fold_of(columns: Columns, dp_shard: Whole) -> Whole:
    """Return among how many ranks experts are shared out, with so many shards: an array."""
    whole = columns["expert_tp"] == 1
    return dp_shard * columns["cp"] * np.where(whole, columns["tp"], 1)


def _pinned(pins: Pins, columns: Columns, *names: str) -> Columns:
    for name in names:
        wanted = pins.of(name)
        if wanted is not None:
            columns = taken(columns, np.isin(columns[name], np.array(wanted, dtype=np.int64)))
    return columns
