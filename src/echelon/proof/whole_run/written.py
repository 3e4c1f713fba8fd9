# SPDX-License-Identifier: Apache-2.0
"""The streams behind the text that a trained model writes, compared with one device by place.

The trainer keeps the residual stream of every pass (`training/whole_run.py`): of the whole text for
each token, or of prompts and then of one token each over a cache. One process reads the same tokens
at once. The first place that differs is named, and attention with other keys, positions or weights
is tried there: a cause must make every row of that pass, right and wrong ones.

Shape suffixes: N rows of a pass, T positions, S keys, H heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from echelon.core.plan import Plan
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.independent.attention import ScoreSettings, attend, turned, turns_of
from echelon.proof.independent.decoder import OUTPUT, RESIDUAL
from echelon.proof.independent.sequence import EMBEDDING_UNIT, SequenceRun
from echelon.proof.whole_run.one_device import (
    END_OF_DOCUMENT,
    PROMPTS,
    OneDeviceRun,
    read_text,
)

OVER_A_CACHE = "over a cache"
"""How a text is written that ends where a document does."""
_EXPLAINED = 1e-8
"""Relative error of rows that a cause makes."""
_FURTHEST = 2
"""Positions by which keys are tried earlier and later."""
_CHUNKS = range(1, 5)
"""Sizes of the pieces of a prompt that are tried."""
_ATTENTION = ".attention"

Row = tuple[int, int]
"""The number of a prompt, and a position of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPass:
    """Hold one pass of a model that writes: which rows it has, and the stream at each place."""

    number: int
    rows: Sequence[Row]
    streams: Mapping[str, torch.Tensor]
    says: str
    """Which pass it is."""


@dataclass(frozen=True, kw_only=True)
class WrittenTexts:
    """Hold the passes of a way to write, and one device's run over each text."""

    plan: Plan
    how: str
    prompts: Sequence[int]
    """Tokens of each prompt."""
    passes: Sequence[WrittenPass]
    runs: Sequence[SequenceRun]

    def checks(self, step: int) -> Iterator[Check]:
        """Compare the streams of all passes, by place, the first wrong one first."""
        for seen in self.passes:
            read = {len(stream) for stream in seen.streams.values()}
            problem = f"{sorted(read)} tokens are read instead of {len(seen.rows)} {seen.says}"
            yield exact_check(step, self.subject("rows"), problem * (read != {len(seen.rows)}))
        if not self.reads_all:
            return
        first = self.first_wrong
        places = sorted(self.errors, key=lambda place: first is not None and place != first[0])
        for place in places:
            error, seen = self.errors[place]
            detail = f"off by {error:.2g} {seen.says}" * (error > FLOAT64_TOLERANCE)
            yield Check(step, self.subject(place), error, allowed=FLOAT64_TOLERANCE, detail=detail)

    @property
    def reads_all(self) -> bool:
        """True if every pass has a row for each token that it must read."""
        rows = [
            (len(seen.rows), stream) for seen in self.passes for stream in seen.streams.values()
        ]
        return all(len(stream) == count for count, stream in rows)

    def subject(self, place: str) -> str:
        """Return the name of a place of these texts."""
        return f"{place}, where text is written {self.how}"

    def causes(self) -> Mapping[str, ProofFinding]:
        """The finding of the first wrong place, under its name."""
        first = self.first_wrong if self.reads_all else None
        return {} if first is None else {self.subject(first[0]): first[1]}

    def wanted(self, place: str, row: Row) -> torch.Tensor:
        """Return what one device has at a place for a row, [D]."""
        run, position = self.runs[row[0]], row[1]
        if place == EMBEDDING_UNIT:
            key = [key for key in run.parts if key[0] == EMBEDDING_UNIT][-1]
        elif place.endswith(_ATTENTION):
            key = place.removesuffix(_ATTENTION), OUTPUT, 0
        else:
            key = place, RESIDUAL, 1
        return run.parts[key][position]

    def error(self, seen: WrittenPass, place: str) -> float:
        """Return the largest error of a row at a place."""
        return max(
            relative_error(x_D, self.wanted(place, row), FLOOR)
            for x_D, row in zip(seen.streams[place], seen.rows, strict=True)
        )

    @cached_property
    def errors(self) -> Mapping[str, tuple[float, WrittenPass]]:
        """The largest error at each place, and the first pass in which it is wrong."""
        found: dict[str, tuple[float, WrittenPass]] = {}
        for seen in self.passes:
            for place in seen.streams:
                error = self.error(seen, place)
                # Written so that NaN is kept.
                if place not in found or found[place][0] <= FLOAT64_TOLERANCE:
                    found[place] = error, seen
        return found

    @cached_property
    def first_wrong(self) -> tuple[str, ProofFinding] | None:
        """The first place that is wrong in the first pass with such, and its cause."""
        for seen in self.passes:
            for before, place in zip((None, *seen.streams), seen.streams, strict=False):
                if not self.error(seen, place) <= FLOAT64_TOLERANCE:
                    return place, self._cause(seen, place, before)
        return None

    def _cause(self, seen: WrittenPass, place: str, before: str | None) -> ProofFinding:
        wrong = [
            row
            for x_D, row in zip(seen.streams[place], seen.rows, strict=True)
            if not relative_error(x_D, self.wanted(place, row), FLOOR) <= FLOAT64_TOLERANCE
        ]
        prompt, position = wrong[0]
        where = f"{seen.says}: {len(wrong)} of {len(seen.rows)} rows are wrong, first "
        where += f"position {position} of text {prompt + 1}"
        where += f"; {before}, before it, is right" if before else ""
        if place == EMBEDDING_UNIT:
            return self._embedding(seen, where)
        if not place.endswith(_ATTENTION):
            return ProofFinding("none", f"{where}: the MLP of the block, or what is added, differs")
        left: dict[str, float] = {}
        for variant in variants(self.runs[0].model.layers):
            residual = self._residual(seen, place, variant)
            if residual <= _EXPLAINED:
                return ProofFinding(variant.cause, f"{where}: {variant.says}", residual=residual)
            left[variant.kind] = min(residual, left.get(variant.kind, residual))
        told = ", ".join(f"{kind} {100 * share:.3g} %" for kind, share in left.items())
        says = f"{where}; no cause fits; excluded, with the part that each leaves: {told}"
        return ProofFinding("none", says)

    def _embedding(self, seen: WrittenPass, where: str) -> ProofFinding:
        """Find rows of the table of positions that are those of other tokens."""
        for off in (-1, 1, -2, 2):
            rows = [
                self._embedded(row, row[1] + off)
                for row in seen.rows
                if row[1] + off in range(self.plan.model.max_positions)
            ]
            if len(rows) == len(seen.rows) and _alike(seen.streams[EMBEDDING_UNIT], rows):
                says = f"{where}: positions are off by {off}"
                return ProofFinding("positions off", says, value=float(off))
        return ProofFinding("none", f"{where}: other tokens, or positions")

    def _embedded(self, row: Row, position: int) -> torch.Tensor:
        run = self.runs[row[0]]
        x_D, table = self.wanted(EMBEDDING_UNIT, row), run.weights.get("positions.weight")
        if table is None:
            return x_D
        return x_D + run.model.multipliers.embedding * (table[position] - table[row[1]])

    def _residual(self, seen: WrittenPass, place: str, variant: AttentionVariant) -> float:
        """Return the largest error of a row that a variant leaves; infinite where it has none."""
        residual = 0.0
        for x_D, row in zip(seen.streams[place], seen.rows, strict=True):
            heads = variant.change(self, place.removesuffix(_ATTENTION), row, seen.number > 0)
            if heads is None:
                return float("inf")
            run = replace(self.runs[row[0]], unit=place.removesuffix(_ATTENTION))
            out_D = run.linear(attend(*heads).reshape(1, -1), "attention.o")[0]
            residual = max(residual, relative_error(x_D, out_D, FLOOR))
        return residual


def written_texts(
    plan: Plan,
    right: OneDeviceRun,
    streams: Mapping[str, torch.Tensor],
    written: Mapping[str, Sequence[Sequence[int]]],
) -> list[WrittenTexts]:
    """Return the texts of each way to write, beside one device's runs over the same tokens.

    `streams` has "how/pass/place". None where products round to 8 bits by all that they read, which
    a cache has not.
    """
    if plan.mathematics.precision.is_fp8:
        return []
    plan = _by_length_of_training(plan)
    prompts, found = [list(prompt) for prompt in PROMPTS], list[WrittenTexts]()
    for how, texts in written.items():
        of_passes: dict[int, dict[str, torch.Tensor]] = {}
        for key, stream in streams.items():
            way, number, place = key.split("/")
            if way == how:
                of_passes.setdefault(int(number), {})[place] = stream
        whole = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        if how == OVER_A_CACHE:
            rows = {0: [(p, t) for p, prompt in enumerate(prompts) for t in range(len(prompt))]}
            for number in sorted(of_passes)[1:]:
                live = [p for p, text in enumerate(texts) if len(text) >= number]
                rows[number] = [(p, len(prompts[p]) + number - 1) for p in live]
        else:
            # The last pass over each text has all of its tokens but the last.
            whole = [text[:-1][-plan.model.max_positions :] for text in whole]
            each = len(of_passes) // len(whole)
            rows = {
                (p + 1) * each - 1: [(p, t) for t in range(len(text))]
                for p, text in enumerate(whole)
            }
        found.append(
            WrittenTexts(
                plan=plan,
                how=how,
                prompts=[len(prompt) for prompt in prompts],
                passes=[
                    WrittenPass(
                        number=n,
                        rows=rows[n],
                        streams=_in_order(of_passes[n]),
                        says=_pass(how, n),
                    )
                    for n in sorted(rows)
                ],
                runs=[read_text(plan, right, text) for text in whole],
            )
        )
    return found


def _pass(how: str, number: int) -> str:
    if how != OVER_A_CACHE:
        return "where a text is read whole"
    return f"at token {number + 1} that is written" if number else "where prompts are read"


def _in_order(streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the places of a pass in their order: the attention of a block is before its end."""

    def place(name: str) -> tuple[int, bool]:
        number = name.split(".")[1] if "." in name else "-1"
        return int(number), not name.endswith(_ATTENTION)

    return {name: streams[name] for name in sorted(streams, key=place)}


def _by_length_of_training(plan: Plan) -> Plan:
    """Return the plan whose frequencies are those of sequences as long as in training."""
    scaling, model = plan.model.rope_scaling, plan.model
    if scaling is None or scaling.kind != "longrope" or scaling.original_positions is None:
        return plan
    long = plan.mathematics.sequence_length > scaling.original_positions
    factors = scaling.long_factors if long else scaling.short_factors
    scaling = replace(scaling, short_factors=factors, long_factors=factors)
    model = replace(model, rope_scaling=scaling)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def _alike(seen_ND: torch.Tensor, rows: Sequence[torch.Tensor]) -> bool:
    return relative_error(seen_ND, torch.stack(list(rows)), FLOOR) <= _EXPLAINED


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, ScoreSettings, torch.Tensor]
"""The query of a row, keys and values of all positions, and which of them it meets, [1, S]."""


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Say how attention may go wrong for a row, and what it is called."""

    kind: str
    cause: str
    says: str
    change: Callable[[WrittenTexts, str, Row, bool], Heads | None]
    """Given texts, a block, a row, and whether its keys are in a cache."""


def variants(num_layers: int) -> Iterator[AttentionVariant]:
    """Yield what is tried, the likeliest first."""
    yield from _OF_POSITIONS
    for off in (1, -1, *range(2, _FURTHEST + 1), *range(-_FURTHEST, -1)):
        says = f"positions of tokens that are written are off by {off}"
        change = _turned_by(lambda own, cached: own, query=lambda own, off=off: own + off)
        yield AttentionVariant("rotary positions", "positions off", says, change)
    for cause, says, first, last in _OTHER_KEYS:
        yield AttentionVariant("other keys are met", cause, says, _met(first, last))
    yield from _OF_A_CACHE
    for size in _CHUNKS:
        says = f"keys of the last piece of a prompt, with pieces of {size}, are not"
        for unmet, verb in ((True, "met"), (False, "written to the cache")):
            change = _without_last_piece(size, unmet=unmet)
            cause = "last piece of a prompt"
            yield AttentionVariant("the last piece of a prompt", cause, f"{says} {verb}", change)
    for layer in range(num_layers):
        says = f"the token meets the keys and values of layers.{layer}"
        change = _of_another_block(f"layers.{layer}")
        yield AttentionVariant("keys of another block", "cache of another block", says, change)


def _turned_by(
    key: Callable[[int, bool], int],
    *,
    query: Callable[[int], int] = lambda own: own,
    own_key: bool = False,
) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    """Return a change of positions: of the query and its own key, and of the keys in a cache."""

    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        run, at = texts.runs[row[0]], row[1]
        if run.model.positions != "rope":
            return None
        q, k, v, settings, seen = _right(texts, unit, row)
        latent, last = run.model.latent, len(k) + _FURTHEST + 1
        width = run.model.head_dim if latent is None else latent.rope_dim
        # Turning by 0 leaves the length that stretched frequencies give.
        turns = turns_of(run.model, unit, last)
        places = [key(place, cached) for place in range(len(k))]
        places[at] = query(at) if not own_key else places[at]
        if query(at) < 0 or min(places) < 0:
            return None
        by_place = turns[torch.tensor(places)] / turns[: len(k)]
        by_query = (turns[query(at)] / turns[at])[None]
        k = torch.cat((k[..., :-width], turned(k[..., -width:], by_place)), dim=-1)
        q = torch.cat((q[..., :-width], turned(q[..., -width:], by_query)), dim=-1)
        return q, k, v, settings, seen

    return change


def _right(texts: WrittenTexts, unit: str, row: Row) -> Heads:
    """Return a row as it should be."""
    run, at = texts.runs[row[0]], row[1]
    q, k, v = run.heads[unit]
    settings = ScoreSettings.of(replace(run, unit=unit), unit)
    seen = torch.tensor([[settings.allows(at, key) for key in range(len(k))]])
    return q[at : at + 1], k, v, settings, seen


_OLDEST, _OWN, _FIRST, _LAST = range(4)
"""Keys of a text: the oldest that a token meets, its own, the first and the last of all."""
_OTHER_KEYS = (
    ("oldest key left out", "the oldest key is left out", (_OLDEST, 1), (_OWN, 0)),
    ("own key left out", "a token does not meet its own key", (_OLDEST, 0), (_OWN, -1)),
    ("own key alone", "a token meets its own key alone", (_OWN, 0), (_OWN, 0)),
    (
        "documents see one another",
        "a token meets the documents before its own, or keys beyond its window",
        (_FIRST, 0),
        (_OWN, 0),
    ),
    ("window off by one", "a token meets a key beyond its window", (_OLDEST, -1), (_OWN, 0)),
    ("causal mask", "tokens meet later ones", (_OLDEST, 0), (_LAST, 0)),
)
"""A cause, a sentence, and the first and the last key that a token meets then."""


def _met(
    first: tuple[int, int], last: tuple[int, int]
) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        keys = int(seen[0].nonzero()[0]), row[1], 0, len(k) - 1
        places = torch.arange(len(k))
        met = (places >= keys[first[0]] + first[1]) & (places <= keys[last[0]] + last[1])
        # A token alone meets itself.
        return q, k, v, settings, met[None] if bool(met.any()) else seen

    return change


def _behind_each_end(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
    q, k, v, settings, _ = _right(texts, unit, row)
    tokens = texts.runs[row[0]].tokens
    starts = (0, *(at for at in range(1, len(tokens)) if tokens[at - 1] == END_OF_DOCUMENT))
    settings = replace(settings, documents=starts)
    allowed = [[settings.allows(row[1], key) for key in range(len(k))]]
    return q, k, v, settings, torch.tensor(allowed)


def _of_another_text(off: int) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        other = texts.runs[(row[0] + off) % len(texts.runs)].heads[unit]
        size = len(k) - row[1]
        earlier = [
            torch.cat((pad(theirs, row[1]), own[-size:]))
            for theirs, own in zip(other[1:], (k, v), strict=True)
        ]
        return q, earlier[0], earlier[1], settings, seen

    return change


def _in_one_place(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
    q, k, v, settings, seen = _right(texts, unit, row)
    written = row[1] - texts.prompts[row[0]]
    k, v = k.clone(), v.clone()
    for at in range(row[1] + 1 if cached else 0):
        last = max(
            (max(at - length + 1, 0), text)
            for text, length in enumerate(texts.prompts)
            if at < length + written + 1 and at < len(texts.runs[text].tokens)
        )
        for own, theirs in zip((k, v), texts.runs[last[1]].heads[unit][1:], strict=True):
            own[at] = theirs[at]
    return q, k, v, settings, seen


def _padded(*, first_key: bool) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        shorter = max(texts.prompts) - texts.prompts[row[0]] if cached else 0
        first = texts.runs[0].heads[unit]
        extra = [x[:1] * first_key for x in first[1:]]
        k, v = (torch.cat((x, *[one] * shorter)) for x, one in zip((k, v), extra, strict=True))
        return q, k, v, settings, torch.cat((seen, seen.new_ones(1, shorter)), dim=1)

    return change


def pad(x_SHd: torch.Tensor, size: int) -> torch.Tensor:
    """Return the first rows of keys; zeros where there are none."""
    return torch.cat((x_SHd, x_SHd.new_zeros(size, *x_SHd.shape[1:])))[:size]


def _of_another_block(other: str) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        theirs = texts.runs[row[0]].heads[other]
        if other == unit or any(
            a.shape != b.shape for a, b in zip(theirs[1:], (k, v), strict=True)
        ):
            return None
        return q, theirs[1], theirs[2], settings, seen

    return change


def _unwritten(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
    q, k, v, settings, seen = _right(texts, unit, row)
    k, v = (torch.cat((torch.zeros_like(x[: row[1]]), x[row[1] :])) for x in (k, v))
    return q, k, v, settings, seen


def _shifted(off: int) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        if not cached:
            return q, k, v, settings, seen
        k, v = (x.roll(off, 0) for x in (k, v))
        edge = 0 if off > 0 else row[1]
        k[edge] = v[edge] = 0.0
        return q, k, v, settings, seen

    return change


def _without_last_piece(
    size: int, *, unmet: bool
) -> Callable[[WrittenTexts, str, Row, bool], Heads | None]:
    def change(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
        q, k, v, settings, seen = _right(texts, unit, row)
        length = texts.prompts[row[0]]
        piece = slice((length - 1) // size * size, length)
        if row[1] < length:
            return q, k, v, settings, seen
        if unmet:
            seen = seen.clone()
            seen[:, piece] = False
        else:
            k, v = k.clone(), v.clone()
            k[piece] = v[piece] = 0.0
        return q, k, v, settings, seen

    return change


def _heads_in_turn(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
    q, k, v, settings, seen = _right(texts, unit, row)
    if k.shape[1] in (1, q.shape[1]):
        return None
    order = torch.arange(q.shape[1]) % k.shape[1]
    return q, k[:, order], v[:, order], settings, seen


def _unscaled(texts: WrittenTexts, unit: str, row: Row, cached: bool) -> Heads | None:
    q, k, v, settings, seen = _right(texts, unit, row)
    return q, k, v, replace(settings, scale=1.0), seen


_OF_POSITIONS = (
    AttentionVariant(
        "keys without rotary positions",
        "keys without rotary",
        "keys are cached without their rotary positions",
        _turned_by(lambda own, cached: 0 if cached else own, own_key=True),
    ),
    AttentionVariant(
        "rotary positions",
        "positions start anew",
        "each token that is written has position 0",
        _turned_by(lambda own, cached: own, query=lambda own: 0),
    ),
)
_OF_A_CACHE = (
    AttentionVariant(
        "other documents",
        "document starts",
        "a document starts behind each of several ends in a row",
        _behind_each_end,
    ),
    *(
        AttentionVariant(
            "keys of another text",
            "stale cache",
            "the token meets the keys and values of the text beside its own",
            _of_another_text(off),
        )
        for off in (-1, 1)
    ),
    AttentionVariant(
        "keys of all texts in one place",
        "stale cache",
        "texts have the same places in the cache, and the last one that writes is read",
        _in_one_place,
    ),
    *(
        AttentionVariant(
            "keys in other places",
            "cache off by one",
            f"keys and values lie one place too {word} in the cache",
            _shifted(off),
        )
        for off, word in ((1, "late"), (-1, "early"))
    ),
    *(
        AttentionVariant(
            "padding",
            "padding in the softmax",
            f"shorter texts meet {padding} as often as they are shorter than the longest one",
            _padded(first_key=first_key),
        )
        for padding, first_key in (("zeros", False), ("the first key of the cache", True))
    ),
    AttentionVariant(
        "keys that are never written",
        "cache not written",
        "the keys and values of earlier tokens are zero: they are not written to the cache",
        _unwritten,
    ),
    AttentionVariant(
        "other heads", "heads permuted", "query heads meet key heads in turn", _heads_in_turn
    ),
    AttentionVariant(
        "no scale",
        "multiplier",
        "scores are not divided by the root of the width of a head",
        _unscaled,
    ),
)
