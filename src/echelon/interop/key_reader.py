# SPDX-License-Identifier: Apache-2.0
"""What becomes of each key of a foreign file: a setting, a reason why none is needed, or a refusal.

A tool's `read.py` asks for every key that the tool has. What was given and never asked for is
unknown, and reported with the nearest key that was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from echelon.config.entries import Entry
from echelon.core.errors import Problem
from echelon.core.rulebook.config import WRONG_TYPE
from echelon.core.rulebook.interop import (
    IMPORT_AUTO,
    IMPORT_CONFLICT,
    IMPORT_NOT_HONOURED,
    IMPORT_UNKNOWN_KEY,
)
from echelon.core.rules import Rule, did_you_mean
from echelon.core.settings.value_types import (
    COUNT,
    FROM_ZERO,
    Choice,
    Flag,
    Integer,
    Real,
    Text,
    ValueType,
)
from echelon.interop.abilities import KeyRule

AUTO = "auto"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
NOT_SET = "(not set)"
NUMBER = Real()
POSITIVE = Real(above=True)
FLAG = Flag()
BETA = Real(below=True, maximum=1.0)
FRACTION = Real(maximum=1.0)
ZERO_STAGE = Integer(minimum=0, maximum=3)
KINDS: Mapping[str, ValueType] = {
    "flag": FLAG,
    "count": COUNT,
    "from-zero": FROM_ZERO,
    "number": NUMBER,
    "fraction": FRACTION,
    "text": Text(),
}
"""What the rule of a key may say that it takes."""

Fate: TypeAlias = Literal["taken", "without effect", "dropped", "refused"]
FATES: tuple[Fate, ...] = get_args(Fate)
"""What may become of a key, in the order in which it is summed up."""

Kind: TypeAlias = ValueType | Mapping[str, object] | Mapping[bool, object]
"""What a key takes: a value, or one of these words or truth values, each with what it is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOutcome:
    """Say what became of one key: the setting that it is now ("" for none), and why.

    `rule` is that of a refusal ("" for none); a key that --allow drops is refused no more.
    `is_part` is for a key that is taken into a setting which stands in another row.
    """

    key: str
    given: str
    setting: str = ""
    value: object = None
    why: str
    rule: str = ""
    allowed: bool = False
    is_part: bool = False

    @property
    def fate(self) -> Fate:
        """Return what became of the key, in a word or two."""
        if self.rule:
            return "dropped" if self.allowed else "refused"
        return "taken" if self.setting or self.is_part else "without effect"

    def to_json(self) -> dict[str, object]:
        """Return the row as a JSON object."""
        return {**asdict(self), "fate": self.fate}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Hold a problem and the keys that it is about: without one of them it is none."""

    keys: tuple[str, ...]
    problem: Problem


@dataclass(slots=True)
class KeyReader:
    """Take keys out of a foreign file, noting what becomes of each of them."""

    tool: str
    path: str
    given: Mapping[str, object]
    rows: list[KeyOutcome] = field(default_factory=list[KeyOutcome])
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    assumptions: list[str] = field(default_factory=list[str])
    known: dict[str, None] = field(default_factory=dict[str, None])

    @property
    def problems(self) -> list[Problem]:
        """Return the problem of each refusal."""
        return [refusal.problem for refusal in self.refusals]

    @property
    def default(self) -> str:
        """Return what to call the place of a value that only the tool knows."""
        return f"default of {self.tool}"

    def where(self, *keys: str) -> str:
        """Return what to call the place of these keys."""
        return f"{self.path}: {', '.join(keys)}"

    def text(self, key: str) -> str:
        """Return the value of a key as it is shown."""
        return json_text(self.given[key]) if key in self.given else NOT_SET

    def has(self, key: str) -> bool:
        """Return whether a key has a value; null and an empty table are none."""
        self.known[key] = None
        return self.given.get(key) not in (None, {})

    def is_auto(self, key: str) -> bool:
        """Return whether the value of a key is "auto"."""
        return self.has(key) and self.given[key] == AUTO

    def read(self, key: str, kind: ValueType, *, setting: str = "") -> object | None:
        """Return the value of a key, or None where it is absent or wrong (which is then noted)."""
        if not self.has(key):
            return None
        value = self.given[key]
        if isinstance(value, float) and isinstance(kind, Integer) and value.is_integer():
            value = int(value)  # 5e8 is a whole number to the tools.
        if isinstance(value, str) and isinstance(kind, Real) and _EXPONENT.fullmatch(value):
            value = float(value)  # YAML 1.1 reads 2e-5 as a word, and the tools as a number.
        invalid = kind.check(value)
        if invalid is None:
            return value
        rule, why = invalid.rule, invalid.message
        if value == AUTO:
            rule = IMPORT_AUTO
            why = f"has no counterpart to be resolved from; it takes {kind.describe()}"
        message = f"{key} = {json_text(value)} {why}"
        self.note(rule, message, setting or key, self.where(key), invalid.suggestions)
        return None

    def integer(self, key: str, kind: Integer = FROM_ZERO, *, setting: str = "") -> int | None:
        """Return a whole number, or None."""
        return cast("int | None", self.read(key, kind, setting=setting))

    def number(self, key: str, kind: Real = NUMBER, *, setting: str = "") -> float | None:
        """Return a number, or None."""
        return cast("float | None", self.read(key, kind, setting=setting))

    def flag(self, key: str, *, setting: str = "") -> bool | None:
        """Return a truth value, or None."""
        return cast("bool | None", self.read(key, FLAG, setting=setting))

    def word(self, key: str, options: Iterable[str], *, setting: str = "") -> str | None:
        """Return one of a few words, or None."""
        kind = Choice(options=tuple(options))
        return cast("str | None", self.read(key, kind, setting=setting))

    def set(self, key: str, setting: str, value: object, why: str, *, source: str = "") -> None:
        """Map a key to a setting; another value that it already has is a conflict."""
        before = self.entries.get(setting)
        if before is not None and before.value != value:
            self.conflict(
                f"{setting} would be {json_text(before.value)} and {json_text(value)}",
                setting,
                f"{before.source}, {source or self.where(key)}",
            )
            return
        self.entries[setting] = Entry(value=value, source=source or self.where(key))
        given = self.text(key)
        self.rows.append(KeyOutcome(key=key, given=given, setting=setting, value=value, why=why))

    def take(
        self,
        key: str,
        setting: str,
        kind: Kind,
        why: str,
        *,
        default: object = None,
        auto: str = "",
    ) -> Any:
        """Map a key to the setting that it means, and return its value; None where it sets none.

        Where the key is absent the value is `default`, that of the tool, if there is one. `auto`
        says where the value comes from that the word "auto" leaves open.
        """
        if auto and self.is_auto(key):
            self.skip(key, auto)
            return None
        words: Mapping[Any, object] | None = kind if isinstance(kind, Mapping) else None
        if words is not None:
            kind = FLAG if True in words else Choice(options=tuple(words))
        given = self.read(key, cast(ValueType, kind), setting=setting)
        value = words[given] if words and given is not None else given
        if value is None and not self.has(key):
            value = default
        if value is not None:
            self.set_or_default(key, setting, value, why)
        return value

    def judge(self, rules: Mapping[str, KeyRule], prefix: str = "") -> None:
        """Do with each of these keys what its rule says."""
        for name, rule in rules.items():
            key = f"{prefix}{name}"
            if rule.to:
                self.take(key, rule.to, rule.words or KINDS[rule.takes], rule.why)
            elif rule.refused:
                if self.has(key):
                    self.refuse(key, rule.why)
            elif rule.only is not None:
                self.only(key, rule.only, rule.why, setting=rule.setting)
            elif not rule.takes or self.read(key, KINDS[rule.takes]) is not None:
                self.skip(key, rule.why)

    def judge_prefixes(self, rules: Mapping[str, KeyRule]) -> None:
        """Judge keys that nothing asked for by how they begin; the first rule that fits counts."""
        for key in self.given:
            if key not in self.known:
                fitting = (rule for prefix, rule in rules.items() if key.startswith(prefix))
                if (rule := next(fitting, None)) is not None:
                    self.judge({key: rule})

    def set_or_default(self, key: str, setting: str, value: object, why: str) -> None:
        """Map a key to a setting; where it is absent, the value is a default of the tool."""
        self.set(key, setting, value, why, source="" if self.has(key) else self.default)

    def skip(self, key: str, why: str) -> None:
        """Say why a key that is given needs no setting."""
        if self.has(key):
            self.rows.append(KeyOutcome(key=key, given=self.text(key), why=why))

    def take_part(self, key: str, why: str) -> None:
        """Say of which setting, in another row, a key that is given is a part."""
        if self.has(key):
            self.rows.append(KeyOutcome(key=key, given=self.text(key), why=why, is_part=True))

    def skip_all(self, keys: Iterable[str], why: str) -> None:
        """Say of several keys, where they are given, why they need no setting."""
        for key in keys:
            self.skip(key, why)

    def sections(self, names: Iterable[str]) -> None:
        """Note that these are tables; one that is a value instead is wrong."""
        for name in names:
            if self.has(name):
                message = f"{name} = {self.text(name)} is not a table"
                self.note(WRONG_TYPE, message, name, self.where(name), (f"no {name}",))

    def skip_table(self, table: str, why: str) -> None:
        """Say why no key of a table needs a setting."""
        self.know_table(table)
        for key in self.keys_of(table):
            self.skip(key, why)

    def refuse_table(self, table: str, why: str) -> None:
        """Refuse a table as a whole, unless it is empty."""
        self.know_table(table)
        keys = [key for key in self.keys_of(table) if self.given[key] not in (None, {})]
        if keys:
            message = f"{table} is refused: {why}"
            self.note(IMPORT_NOT_HONOURED, message, table, self.where(*keys), (f"no {table}",))

    def know_table(self, table: str) -> None:
        """Note that whatever a table holds has been looked at."""
        self.known.update(dict.fromkeys((table, *self.keys_of(table))))

    def keys_of(self, table: str) -> list[str]:
        """Return the keys that are given in a table (or the table itself, where it is a value)."""
        return [key for key in self.given if key == table or key.startswith(f"{table}.")]

    def only(self, key: str, allowed: Iterable[object], why: str, *, setting: str = "") -> bool:
        """Accept the values that mean what is done here; refuse any other, and return False."""
        allowed = tuple(allowed)
        if not self.has(key):
            return True
        value = self.given[key]
        if any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
        ):
            self.skip(key, why)
            return True
        self.refuse(key, why, suggestions=map(json_text, allowed), setting=setting)
        return False

    def refuse(
        self, key: str, why: str, *, suggestions: Iterable[str] = (), setting: str = ""
    ) -> None:
        """Refuse the value of a key by name."""
        given = key in self.given
        what = f"{key} = {self.text(key)}" if given else f"{key} is not set"
        instead = (*suggestions, *([f"no {key}"] if given else []))
        problem = IMPORT_NOT_HONOURED.problem(
            f"{what}: {why}", key=setting or key, set_by=self.where(key), suggestions=instead
        )
        self.refusals.append(Refusal(keys=(key,), problem=problem))

    def conflict(
        self, message: str, setting: str, set_by: str, suggestions: Iterable[object] = ()
    ) -> None:
        """Note that two values cannot both hold."""
        self.note(IMPORT_CONFLICT, message, setting, set_by, suggestions)

    def note(
        self, rule: Rule, message: str, key: str, set_by: str, suggestions: Iterable[object] = ()
    ) -> None:
        """Note a problem, and go on; it is about the keys that `set_by` names, or about `key`."""
        problem = rule.problem(message, key=key, set_by=set_by, suggestions=suggestions)
        self.refusals.append(Refusal(keys=self._keys_at(set_by) or (key,), problem=problem))

    def assume(self, what: str) -> None:
        """Note what the file leaves open and is taken to be."""
        self.assumptions.append(what)

    def _keys_at(self, set_by: str) -> tuple[str, ...]:
        """Return the keys that are named by `where`."""
        names = set_by.replace(f"{self.path}: ", "").split(", ")
        return tuple(dict.fromkeys(name for name in names if name in self.given))

    def finish(self, rules: Mapping[str, Mapping[str, KeyRule]] | None = None, *names: str) -> None:
        """Note keys without a value, and those that the tool does not have.

        First the groups of `rules` with these names are judged, then what prefixes say of the rest.
        """
        if rules is not None:
            for name in names:
                self.judge(rules[name])
            self.judge_prefixes(rules.get("prefixes", {}))
        for key, value in self.given.items():
            if key in self.known and value in (None, {}):
                why = "null is no value" if value is None else "an empty table sets nothing"
                self.rows.append(KeyOutcome(key=key, given=json_text(value), why=why))
        for key in self.given:
            if key not in self.known:
                near = self._nearest(key)
                hint = f"; did you mean {near[0]}?" if near else ""
                message = f"{key} is no key of {self.tool} that is known here{hint}"
                self.note(IMPORT_UNKNOWN_KEY, message, key, self.where(key), near)

    def _nearest(self, key: str) -> tuple[str, ...]:
        table, _, name = key.rpartition(".")
        siblings = {
            known.rpartition(".")[2]: known
            for known in self.known
            if known.rpartition(".")[0] == table
        }
        if near := did_you_mean(name, siblings):
            return tuple(siblings[word] for word in near)
        same = [known for known in self.known if known.rpartition(".")[2] == name]
        return tuple(same) or did_you_mean(key, self.known)


def json_text(value: object) -> str:
    """Return a value as JSON would have it."""
    return json.dumps(value, default=str)
