# SPDX-License-Identifier: Apache-2.0
"""What a search is kept to: `--pin tp=8`, `--pin schedule=1f1b,zb-h1`, read and applied.

A pin is a name of `PINS` and the values that it lets through. Degrees and counts are whole numbers,
recompute is the share of blocks that run forward again or operators, everything else one of a few
words. Every word that a page prints of a plan is taken too, and its whole line (`plan_line.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import RecomputedOperator
from echelon.core.rulebook.config import BAD_ARGUMENT, NO_EFFECT
from echelon.core.rulebook.planner import UNKNOWN_PIN
from echelon.core.rules import did_you_mean
from echelon.interop.abilities import ToolAbilities
from echelon.planner.search.plan_line import (
    OPERATORS,
    read_plan_line,
    read_printed_value,
    recompute_of_word,
    recompute_value,
    recompute_word,
)
from echelon.schedule.build import SCHEDULES, schedules_of_tool

NO_RECOMPUTE = 0
"""What stands for `recompute=none`; else every how many blocks one is recomputed."""

MOST_RECOMPUTE_INTERVAL = 8  # blocks

SELECTIVE = "selective"
"""What stands for `recompute=selective`: operators of blocks."""

TENSOR_SEQUENCE_PARALLEL = "tensor_sequence_parallel"
"""What stands in limits for sequence parallelism where there are tensor ranks."""

_WORDS: Mapping[str, tuple[str, str]] = {
    "sequence_parallel": ("off", "on"),
    "offload": ("none", "host"),
    "reshard": ("never", "always"),
    "secondary": ("false", "true"),
}
"""How pins that are 0 or 1 are written."""


def _count(word: str) -> int | None:
    return int(word) if word.isdecimal() and 0 < int(word) < 10**7 else None


def _recompute(word: str) -> int | str | None:
    if word in (SELECTIVE, "none", "-"):
        return word if word == SELECTIVE else NO_RECOMPUTE
    return recompute_value(word)


def _schedule(word: str) -> str | None:
    name = schedules_of_tool("megatron").get(word, word)
    return name if name in SCHEDULES else None


_DEGREES = ("tp", "pp", "cp", "dp", "dp_replicate", "dp_shard", "ep", "expert_tp")
PINS: Mapping[str, Callable[[str], int | str | None]] = {
    **dict.fromkeys(_DEGREES, _count),
    "zero": {str(stage): stage for stage in range(4)}.get,
    "schedule": _schedule,
    "virtual": _count,
    "microbatch": _count,
    "recompute": _recompute,
    "context": {str(kind): kind for kind in CONTEXT_KINDS}.get,
    "ulysses": _count,
    **{name: {zero: 0, one: 1}.get for name, (zero, one) in _WORDS.items()},
    "sequence_parallel": {"on": 1, "true": 1, "1": 1, "off": 0, "false": 0, "0": 0}.get,
    "gather": {name: name for name in ("parameters", "fp8", "int8")}.get,
    "int8_block": _count,
    "reduce": {name: name for name in ("exact", "int8", "int4")}.get,
    "devices": _count,
}
"""Every pin, and what reads one of its values; None where a word is none."""

SETTINGS = {
    "stage": "zero",
    "virtual_stages": "virtual",
    "microbatch_sequences": "microbatch",
    "policy": "recompute",
    "operators": "recompute",
    "kind": "context",
    "ulysses_degree": "ulysses",
    "optimizer_offload": "offload",
    "reshard_after_forward": "reshard",
}
"""Pins by the last word of the setting that they are."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"),
    "schedule": tuple(SCHEDULES),
    "recompute": (
        *("none", "full (all)", "full/2 (1/2)", SELECTIVE),
        *(OPERATORS[0], "+".join(OPERATORS[:2]), f"full/3+{OPERATORS[0]}"),
    ),
    "context": tuple(CONTEXT_KINDS),
    **_WORDS,
    "gather": ("parameters", "fp8", "int8"),
    "reduce": ("exact", "int8", "int4"),
}
"""Values of pins that are no counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Hold what each pinned name lets through; every other name lets everything through.

    `texts` are pins by themselves, `tp=8`, without those that the line of a whole plan implies;
    `typed` is what a user wrote, `--pin tp=8` or `--set mesh.tp=8`. `limits` are what a trainer can
    run, whatever is pinned.
    """

    values: Mapping[str, tuple[int | str, ...]] = field(
        default_factory=dict[str, tuple[int | str, ...]]
    )
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    typed: Mapping[str, str] = field(default_factory=dict[str, str])
    limits: Mapping[str, tuple[int | str, ...]] = field(
        default_factory=dict[str, tuple[int | str, ...]]
    )

    def allows(self, name: str, value: int | str) -> bool:
        """Return whether a value of a pinned name, or of another one, may be."""
        found = self.values_of(name)
        return found is None or value in found

    def values_of(self, name: str) -> tuple[int | str, ...] | None:
        """Return the values that a name may have, None where it may have any."""
        pinned, limit = self.values.get(name), self.limits.get(name)
        if pinned is None or limit is None:
            return limit if pinned is None else pinned
        return tuple(value for value in pinned if value in limit)

    def text(self, name: str) -> str:
        """Return a pin as it is written, also one that the line of a whole plan implies."""
        words = (pin_word(name, value) for value in self.values[name])
        return self.texts.get(name) or f"{name}={','.join(words)}"

    def without(self, *names: str) -> Pins:
        """Return the other pins."""
        return Pins(
            values={key: value for key, value in self.values.items() if key not in names},
            texts={key: text for key, text in self.texts.items() if key not in names},
            typed={key: text for key, text in self.typed.items() if key not in names},
            limits=self.limits,
        )

    def having(self, name: str, *values: int | str) -> Pins:
        """Return these pins with one more, or in the place of the one of this name."""
        text = f"{name}={','.join(map(str, values))}"
        values_of, texts = {**self.values, name: values}, {**self.texts, name: text}
        typed = {**self.typed, name: f"--pin {text}"}
        return Pins(values=values_of, texts=texts, typed=typed, limits=self.limits)


def limits_of_tool(abilities: ToolAbilities, *, experts: bool) -> dict[str, tuple[int | str, ...]]:
    """Return what each pin may be for a tool, for a model with experts or without."""
    cut = abilities.sequence_parallel_with_experts if experts else abilities.sequence_parallel
    found: dict[str, tuple[int | str, ...] | None] = {
        **abilities.degrees,
        "schedule": abilities.schedules,
        "virtual": abilities.virtual_stages,
        "context": abilities.context_kinds,
        # Operators by name are ours.
        "recompute": abilities.recompute_every or tuple(range(MOST_RECOMPUTE_INTERVAL + 1)),
        "zero": abilities.zero_stages,
        "offload": None if abilities.offload else (0,),
        # What ZeRO++ adds is ours: other trainers have parts of it, under other conditions.
        "secondary": (0,),
        "gather": ("parameters",),
        "reduce": ("exact",),
        TENSOR_SEQUENCE_PARALLEL: None if cut is None else (int(cut),),
    }
    return {name: values for name, values in found.items() if values is not None}


def pin_word(name: str, value: int | str) -> str:
    """Return how a value of a pin is written."""
    if name == "recompute":
        return value if isinstance(value, str) else recompute_word(value, ())
    return _WORDS[name][int(value)] if name in _WORDS else str(value)


def recompute_of_pin(value: int | str) -> tuple[int, tuple[RecomputedOperator, ...]]:
    """Return the interval of recomputed blocks, and the recomputed operators of other blocks."""
    if isinstance(value, int):
        return value, ()
    found = recompute_of_word(value)
    assert found is not None, "a pin of operators is read before it is kept"
    return found


def pin_of_setting(key: str) -> str:
    """Return the name of the pin that a setting such as ``mesh.tp`` is."""
    word = key.strip().rpartition(".")[2].replace("-", "_")
    return SETTINGS.get(word, word)


@dataclass(slots=True)
class _PinReader:
    """Take pins in turn, and keep their problems."""

    pins: Pins = field(default_factory=Pins)
    implied: dict[str, tuple[int | str, ...]] = field(
        default_factory=dict[str, tuple[int | str, ...]]
    )
    """Pins that whole plans imply by leaving words out: other pins win."""
    lines: dict[str, str] = field(default_factory=dict[str, str])
    """The typed line that implies each of them."""
    problems: list[Problem] = field(default_factory=list[Problem])

    def read(self, flag: str, text: str) -> None:
        """Take the pins of a text; a text without any is a problem."""
        typed = f"{flag} {text}"
        key, equals, listed = text.partition("=")
        name = pin_of_setting(key)
        if name in PINS and " " not in key.strip():
            self._read_values(typed, name, listed)
            return
        line = read_plan_line(text) if flag == "--pin" else None
        if line is not None:
            for one, values in line.named.items():
                self._take(typed, one, values)
            self.implied |= line.implied
            self.lines |= dict.fromkeys(line.implied, typed)
            return
        reason = f"there is nothing called {name!r} to pin" if equals else "no word of a plan"
        near = did_you_mean(name, PINS) or tuple(PINS)
        problem = UNKNOWN_PIN.problem(f"{typed}: {reason}", set_by=typed, suggestions=near)
        self.problems.append(problem)

    def _read_values(self, typed: str, name: str, listed: str) -> None:
        words = [word.strip() for word in listed.split(",")]
        values = [PINS[name](word) for word in words]
        if None not in values:
            found = tuple(value for value in values if value is not None)
            self._take(typed, name, found, typed.partition(" ")[2])
            return
        printed = read_printed_value(name, words[0]) if len(words) == 1 else None
        if printed is None:
            self.problems.append(
                UNKNOWN_PIN.problem(
                    f"{typed}: that is no value of {name}",
                    set_by=typed,
                    suggestions=VALUES.get(name, (f"{name}=8",)),
                )
            )
            return
        for one, some in printed.items():
            self._take(typed, one, some)

    def _take(
        self, typed: str, name: str, values: tuple[int | str, ...], text: str | None = None
    ) -> None:
        pins = self.pins
        if name in pins.values and (text is not None or pins.values[name] != values):
            self.problems.append(_pinned_twice(pins.typed[name], typed, name))
            return
        if text is None:
            # Many values are every one but the first: 1.
            words = ",".join(pin_word(name, value) for value in values)
            text = f"{name}={words}" if len(values) == 1 else f"{name}>1"
        self.pins = Pins(
            values={**pins.values, name: values},
            texts={**pins.texts, name: text},
            typed={**pins.typed, name: typed},
        )

    def result(self) -> Pins:
        """Return all pins; ConfigError with every problem."""
        values = self.pins.values
        if "int8_block" in values and "int8" not in values.get("gather", ()):
            typed = self.pins.typed["int8_block"]
            self.problems.append(
                NO_EFFECT.problem(
                    f"{typed} changes nothing: no matrix is rounded to int8",
                    set_by=typed,
                    suggestions=("--pin gather=int8",),
                )
            )
        if self.problems:
            raise ConfigError(self.problems)
        return replace(
            self.pins, values={**self.implied, **values}, typed={**self.lines, **self.pins.typed}
        )


def read_pins(texts: Iterable[str], settings: Iterable[str] = ()) -> Pins:
    """Return the pins that words such as ``tp=8`` or ``schedule=1f1b,zb-h1`` say.

    The name of a setting is taken too (``mesh.tp=8``), a word of a page (``cp4g``), and the line of
    a whole plan; `settings` were typed after --set. ConfigError names each that is none.
    """
    reader = _PinReader()
    for flag, some in (("--set", settings), ("--pin", texts)):
        for text in some:
            reader.read(flag, text)
    return reader.result()


def _pinned_twice(first: str, second: str, name: str) -> Problem:
    texts = [typed.partition(" ")[2].partition("=") for typed in (first, second)]
    plain = all(pin_of_setting(key) == name for key, _, _ in texts)
    both = ",".join(value for _, _, value in texts)
    return BAD_ARGUMENT.problem(
        f"{first} and {second} pin the same; values that may be are one list"
        if plain
        else f"{first} and {second} both pin {name}",
        set_by=second,
        suggestions=(f"--pin {name}={both}",) if plain else (f"one --pin of {name}",),
    )
