"""What a search is kept to: `--pin tp=8`, `--pin schedule=1f1b,zb-h1`, read and applied.

A pin is a name of `PINS` and the values that it lets through. Degrees and counts are whole numbers,
recompute is the share of blocks that run forward again, everything else one of a few words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.planner import UNKNOWN_PIN
from echelon.core.rules import did_you_mean
from echelon.interop.abilities import ToolAbilities
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
    if word == SELECTIVE:
        return word
    kind, slash, every = word.partition("/")
    if kind == "none":
        return None if slash else NO_RECOMPUTE
    return (_count(every) if slash else 1) if kind == "full" else None


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
    "kind": "context",
    "ulysses_degree": "ulysses",
    "optimizer_offload": "offload",
    "reshard_after_forward": "reshard",
}
"""Pins by the last word of the setting that they are."""

EXAMPLES = {
    "zero": "zero=3",
    "schedule": "schedule=1f1b",
    "recompute": "recompute=full/2",
    "context": "context=ring",
    "sequence_parallel": "sequence_parallel=on",
    "offload": "offload=host",
    "reshard": "reshard=never",
    "secondary": "secondary=true",
    "gather": "gather=int8",
    "reduce": "reduce=int8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Hold what each pinned name lets through; every other name lets everything through.

    `typed` is what a user wrote of it, `--pin tp=8` or `--set mesh.tp=8`; `limits` are what a
    trainer can run, whatever is pinned.
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
        if value == SELECTIVE:
            return SELECTIVE
        return "none" if value == NO_RECOMPUTE else "full" if value == 1 else f"full/{value}"
    return _WORDS[name][int(value)] if name in _WORDS else str(value)


def pin_of_setting(key: str) -> str:
    """Return the name of the pin that a setting such as ``mesh.tp`` is."""
    word = key.strip().rpartition(".")[2].replace("-", "_")
    return SETTINGS.get(word, word)


def read_pins(texts: Iterable[str], settings: Iterable[str] = ()) -> Pins:
    """Return the pins that words such as ``tp=8`` or ``schedule=1f1b,zb-h1`` say.

    The name of a setting is taken too (``mesh.tp=8``); `settings` were typed after --set.
    ConfigError names each that is none.
    """
    values: dict[str, tuple[int | str, ...]] = {}
    pinned: dict[str, str] = {}
    flags: dict[str, str] = {}
    problems: list[Problem] = []
    words = [*(("--set", text) for text in settings), *(("--pin", text) for text in texts)]
    for flag, text in words:
        typed = f"{flag} {text}"
        key, _, listed = text.partition("=")
        name = pin_of_setting(key)
        if name not in PINS:
            near = did_you_mean(name, PINS)
            problems.append(
                UNKNOWN_PIN.problem(
                    f"{typed}: there is nothing called {name!r} to pin",
                    set_by=typed,
                    suggestions=near or tuple(PINS),
                )
            )
            continue
        found = [PINS[name](word.strip()) for word in listed.split(",")]
        if None in found:
            problems.append(_wrong_value(typed, name))
            continue
        if name in pinned:
            problems.append(_pinned_twice(flags[name], typed, name))
            continue
        values[name] = tuple(value for value in found if value is not None)
        pinned[name], flags[name] = text, typed
    if "int8_block" in values and "int8" not in values.get("gather", ()):
        problems.append(
            NO_EFFECT.problem(
                f"{flags['int8_block']} changes nothing: no matrix is rounded to int8",
                set_by=flags["int8_block"],
                suggestions=("--pin gather=int8",),
            )
        )
    if problems:
        raise ConfigError(problems)
    return Pins(values=values, texts=pinned, typed=flags)


def _pinned_twice(first: str, second: str, name: str) -> Problem:
    both = f"{first.partition('=')[2]},{second.partition('=')[2]}"
    return BAD_ARGUMENT.problem(
        f"{first} and {second} pin the same; values that may be are one list",
        set_by=second,
        suggestions=(f"--pin {name}={both}",),
    )


def _wrong_value(typed: str, name: str) -> Problem:
    words = {"schedule": tuple(SCHEDULES), "context": tuple(CONTEXT_KINDS)}.get(name)
    return UNKNOWN_PIN.problem(
        f"{typed}: that is no value of {name}",
        set_by=typed,
        suggestions=words or (EXAMPLES.get(name, f"{name}=8"),),
    )
