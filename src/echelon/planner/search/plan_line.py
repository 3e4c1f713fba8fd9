# SPDX-License-Identifier: Apache-2.0
"""A plan as pages print it, read as pins: ``pp2 dp8, ZeRO 1, 1f1b x3, microbatches of 2``.

Each word of a page is one pin or several: ``cp4g`` is `cp=4` and `context=gathered`. A line with a
mesh and a ZeRO stage is a whole plan, which implies the other pins: degrees of 1, no recompute,
nothing on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TypeAlias, get_args

from echelon.core.choices.context_kinds import CONTEXT_KINDS, PLAIN_CONTEXT_KIND
from echelon.core.plan import RecomputedOperator
from echelon.schedule.build import SCHEDULES

PinValue: TypeAlias = int | str
PinValues: TypeAlias = Mapping[str, PinValue]
Pinned: TypeAlias = Mapping[str, tuple[PinValue, ...]]

AXES = ("pp", "dp", "cp", "tp", "ep")
OPERATORS: tuple[RecomputedOperator, ...] = get_args(RecomputedOperator)
_LETTERS = 2  # letters of an operator's sign
_AS_TENSOR_RANKS = "tp"
"""A number of pieces of each expert that is the number of tensor ranks."""
_MOST_TENSOR_RANKS = 128  # ranks
_SEPARATOR = re.compile(r"[\s,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """The pins that a line names, and the pins that it implies."""

    named: Pinned
    implied: Pinned = field(default_factory=dict[str, tuple[PinValue, ...]])


def read_plan_line(text: str) -> PlanLine | None:
    """Return the pins of a line; None if pages print no such word."""
    named: dict[str, PinValue] = {}
    place, count = 0, 0
    while place < len(text):
        if gap := _SEPARATOR.match(text, place):
            place = gap.end()
            continue
        for pattern, values_of in _words():
            match = pattern.match(text, place)
            values = None if match is None else values_of(match)
            if match is not None and values is not None:
                named.update(values)
                place, count = match.end(), count + 1
                break
        else:
            return None
    if not count:
        return None
    implied = dict(_implied(named)) if count > 1 else {}
    return PlanLine(
        named={name: _values(name, one, named) for name, one in named.items()},
        implied={name: (one,) for name, one in implied.items() if name not in named},
    )


def _values(name: str, value: PinValue, named: Mapping[str, PinValue]) -> tuple[PinValue, ...]:
    """Return the values of a word; `expert_tp` is the number of tensor ranks."""
    if name == "expert_tp" and value == _AS_TENSOR_RANKS:
        return (named["tp"],) if "tp" in named else tuple(range(2, _MOST_TENSOR_RANKS + 1))
    return (value,)


def read_printed_value(name: str, word: str) -> Pinned | None:
    """Return the pins of a printed value of a pin: `4g` of cp, `1+h` of zero."""
    prefixed = {**dict.fromkeys((*AXES, "zero"), f"{name}{word}"), "recompute": f"rec {word}"}
    line = read_plan_line(prefixed.get(name, word))
    if line is None:
        return None
    named = line.named
    if name == "dp" and {"dp_replicate", "dp_shard"} <= {*named}:
        return named
    # "-" in the column of schedules says that there is no pipeline.
    return named if name in named or (name, word) == ("schedule", "-") else None


def recompute_word(every: int, operators: tuple[str, ...]) -> str:
    """Return recompute as a pin writes it: ``full/3+norm+activation``."""
    blocks = "full" if every == 1 else f"full/{every}"
    return "+".join([*([blocks] if every else []), *operators]) or "none"


def recompute_of_word(word: str) -> tuple[int, tuple[RecomputedOperator, ...]] | None:
    """Return the interval of recomputed blocks, 0 for none, and the operators of other blocks.

    Blocks are "full", "all", "full/3" or "1/3", operators their names or signs. None where the word
    is none.
    """
    every, names = 0, set[RecomputedOperator]()
    for part in re.split(r"\+| and ", word.strip()):
        blocks = re.fullmatch(r"(?:full|all|(?:full|1)/([1-9]\d*))", part)
        if blocks is not None and not every:
            every = int(blocks[1] or 1)
            if not every:
                return None
            continue
        operators = _operators(part)
        if operators is None or names & {*operators}:
            return None
        names |= {*operators}
    return every, tuple(one for one in OPERATORS if one in names)


def recompute_value(word: str) -> PinValue | None:
    """Return the value of a pin that a word of recompute is; None where it is none."""
    found = recompute_of_word(word)
    if found is None:
        return None
    every, operators = found
    return recompute_word(every, operators) if operators else every


def _operators(part: str) -> tuple[RecomputedOperator, ...] | None:
    """Return the operator of a name, or the operators of signs such as ``noac``; else None."""
    by_name: dict[str, RecomputedOperator] = {one: one for one in OPERATORS}
    if part in by_name:
        return (by_name[part],)
    by_sign: dict[str, RecomputedOperator] = {one[:_LETTERS]: one for one in OPERATORS}
    signs = [part[place : place + _LETTERS] for place in range(0, len(part), _LETTERS)]
    if not signs or any(sign not in by_sign for sign in signs):
        return None
    return tuple(by_sign[sign] for sign in signs)


_Values: TypeAlias = Callable[[re.Match[str]], PinValues | None]


@cache
def _words() -> tuple[tuple[re.Pattern[str], _Values], ...]:
    """Return every word that pages print of a plan, with its pins."""
    names = "|".join(sorted(map(re.escape, SCHEDULES), key=len, reverse=True))
    short = {one.short_name: name for name, one in SCHEDULES.items() if one.short_name}
    shorts = "|".join(sorted(map(re.escape, short), key=len, reverse=True))
    operators = "|".join(OPERATORS)
    listed = rf"(?:{operators})(?: and (?:{operators}))*"

    def interleaved(match: re.Match[str]) -> PinValues:
        return {"schedule": short[match[1]], "virtual": int(match[2])}

    found: tuple[tuple[str, _Values], ...] = (
        (r"one rank", lambda _: dict.fromkeys(AXES, 1)),
        (r"(?:on )?([1-9][\d,]*) devices?", lambda one: {"devices": int(one[1].replace(",", ""))}),
        (r"([1-9][\d,]*):", lambda one: {"devices": int(one[1].replace(",", ""))}),
        (r"pp([1-9]\d*)", lambda one: {"pp": int(one[1])}),
        (
            r"dp([1-9]\d*)x([1-9]\d*)",
            lambda one: {"dp_replicate": int(one[1]), "dp_shard": int(one[2])},
        ),
        (r"dp([1-9]\d*)", lambda one: {"dp": int(one[1])}),
        (r"cp([1-9]\d*)([a-z]*)(\d*)", _context),
        (r"tp([1-9]\d*)s", lambda one: {"tp": int(one[1]), "sequence_parallel": 1}),
        (r"tp([1-9]\d*)", lambda one: {"tp": int(one[1])}),
        (r"ep([1-9]\d*)t", lambda one: {"ep": int(one[1]), "expert_tp": _AS_TENSOR_RANKS}),
        (r"ep([1-9]\d*)", lambda one: {"ep": int(one[1])}),
        (r"(?:ZeRO |zero)([0-3])((?:\+[a-z])*)", _zero),
        (rf"({shorts}) ?x([1-9]\d*)", interleaved),
        (rf"({names})", lambda one: {"schedule": one[1]}),
        (r"(?:microbatches of |mb)([1-9]\d*)", lambda one: {"microbatch": int(one[1])}),
        (r"all blocks recomputed", lambda _: {"recompute": 1}),
        (
            rf"1/([1-9]\d*) of blocks recomputed, ({listed}) of the rest recomputed",
            lambda one: _recompute(f"full/{one[1]}+{one[2]}"),
        ),
        (r"1/([1-9]\d*) of blocks recomputed", lambda one: _recompute(f"full/{one[1]}")),
        (rf"({listed}) recomputed", lambda one: _recompute(one[1])),
        (r"rec -", lambda _: {"recompute": 0}),
        (r"rec ([\w/+]+)", lambda one: _recompute(one[1])),
        (r"parameters whole after forward", lambda _: {"reshard": 0}),
        (r"secondary slices in nodes", lambda _: {"secondary": 1}),
        (r"optimizer state on the host", lambda _: {"offload": 1}),
        (r"zero\.(gather|reduce) ?= ?([a-z0-9]+)", lambda one: {one[1]: one[2]}),
        (r"zero\.int8_block ?= ?([1-9]\d*)", lambda one: {"int8_block": int(one[1])}),
        (r"-", lambda _: {"pp": 1}),
    )
    end = r"(?=[\s,]|$)"
    return tuple((re.compile(pattern + end), values_of) for pattern, values_of in found)


def _context(match: re.Match[str]) -> PinValues | None:
    """Return the pins of ``cp8u2``: context ranks, context kind, and ranks that exchange heads."""
    degree, symbol, inner = int(match[1]), match[2], match[3]
    if not symbol:
        return None if inner else {"cp": degree}
    for name, record in CONTEXT_KINDS.items():
        if record.symbol == symbol and (record.exchange == "inner") == bool(inner):
            return {"cp": degree, "context": name, **({"ulysses": int(inner)} if inner else {})}
    return None


def _zero(match: re.Match[str]) -> PinValues | None:
    """Return the pins of ``3+s+h``: the stage, and its signs."""
    says = {"h": ("offload", 1), "s": ("secondary", 1), "k": ("reshard", 0)}
    signs = match[2].split("+")[1:]
    if any(sign not in says for sign in signs):
        return None
    return {"zero": int(match[1]), **dict(says[sign] for sign in signs)}


def _recompute(word: str) -> PinValues | None:
    value = recompute_value(word)
    return None if value is None else {"recompute": value}


def _implied(named: PinValues) -> Iterator[tuple[str, PinValue]]:
    """Yield the pins that several words imply: of a mesh, and of a whole plan."""
    has_mesh = any(axis in named for axis in (*AXES, "dp_shard"))
    if has_mesh:
        for axis in AXES:
            if axis not in named and not (axis == "dp" and "dp_shard" in named):
                yield axis, 1
        degrees = [named[name] for name in (*AXES[:4], "dp_replicate", "dp_shard") if name in named]
        yield "devices", prod(map(int, degrees))
        if named.get("tp", 1) != 1 and "sequence_parallel" not in named:
            yield "sequence_parallel", 0
        if named.get("cp", 1) != 1 and "context" not in named:
            yield "context", PLAIN_CONTEXT_KIND
        if named.get("ep", 1) != 1 and "expert_tp" not in named:
            yield "expert_tp", 1
    if not has_mesh or "zero" not in named:
        return
    yield from (("recompute", 0), ("microbatch", 1), ("offload", 0), ("secondary", 0))
    yield from (("reshard", 1), ("gather", "parameters"), ("reduce", "exact"))
    if named["zero"] != 0 and "dp" in named:
        yield from (("dp_replicate", 1), ("dp_shard", named["dp"]))
