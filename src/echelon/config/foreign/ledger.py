"""What becomes of each key of a foreign file: a setting, a reason why none is needed, or a refusal.

A reader asks the ledger for every key that its tool has. What was given and never asked for is
unknown, and reported with the nearest key that was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from echelon.config.entries import Entry
from echelon.config.kinds import Choice, Flag, Integer, Kind, Real
from echelon.core.errors import Problem
from echelon.core.rulebook.config import WRONG_TYPE
from echelon.core.rulebook.imports import (
    IMPORT_AUTO,
    IMPORT_CONFLICT,
    IMPORT_NOT_HONOURED,
    IMPORT_UNKNOWN_KEY,
)
from echelon.core.rules import did_you_mean

AUTO = "auto"
NOT_SET = "(not set)"
COUNT = Integer()
FROM_ZERO = Integer(minimum=0)
NUMBER = Real()
POSITIVE = Real(above=True)
FLAG = Flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Say what became of one key: the setting that it is now ("" for none), and why."""

    key: str
    given: str
    setting: str = ""
    value: object = None
    why: str

    def to_json(self) -> dict[str, object]:
        """Return the row as a JSON object."""
        return {
            "key": self.key,
            "given": self.given,
            "setting": self.setting,
            "value": self.value,
            "why": self.why,
        }


@dataclass(slots=True)
class Ledger:
    """Take keys out of a foreign file, noting what becomes of each of them."""

    tool: str
    path: str
    given: Mapping[str, object]
    rows: list[Row] = field(default_factory=list[Row])
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    problems: list[Problem] = field(default_factory=list[Problem])
    known: dict[str, None] = field(default_factory=dict[str, None])

    @property
    def default(self) -> str:
        """Return what to call the place of a value that only the tool knows."""
        return f"default of {self.tool}"

    def where(self, *keys: str) -> str:
        """Return what to call the place of these keys."""
        return f"{self.path}: {', '.join(keys)}"

    def text(self, key: str) -> str:
        """Return the value of a key as it is shown."""
        return shown(self.given[key]) if key in self.given else NOT_SET

    def has(self, key: str) -> bool:
        """Return whether a key has a value; null and an empty table are none."""
        self.known[key] = None
        return self.given.get(key) not in (None, {})

    def is_auto(self, key: str) -> bool:
        """Return whether the value of a key is "auto"."""
        return self.has(key) and self.given[key] == AUTO

    def read(self, key: str, kind: Kind, *, setting: str = "") -> object | None:
        """Return the value of a key, or None where it is absent or wrong (which is then noted)."""
        if not self.has(key):
            return None
        value = self.given[key]
        if isinstance(value, float) and isinstance(kind, Integer) and value.is_integer():
            value = int(value)  # 5e8 is a whole number to the tools.
        misfit = kind.misfit(value)
        if misfit is None:
            return value
        if value == AUTO:
            problem = IMPORT_AUTO.problem(
                f'{key} = "auto" has no counterpart to be resolved from; it takes '
                f"{kind.describe()}",
                key=setting or key,
                set_by=self.where(key),
                works=misfit.works,
            )
        else:
            problem = misfit.rule.problem(
                f"{key} = {shown(value)} {misfit.message}",
                key=setting or key,
                set_by=self.where(key),
                works=misfit.works,
            )
        self.problems.append(problem)
        return None

    def whole(self, key: str, kind: Integer = FROM_ZERO, *, setting: str = "") -> int | None:
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
                f"{setting} would be {shown(before.value)} and {shown(value)}",
                setting,
                f"{before.source}, {source or self.where(key)}",
            )
            return
        self.entries[setting] = Entry(value=value, source=source or self.where(key))
        given = self.text(key)
        self.rows.append(Row(key=key, given=given, setting=setting, value=value, why=why))

    def skip(self, key: str, why: str) -> None:
        """Say why a key that is given needs no setting."""
        if self.has(key):
            self.rows.append(Row(key=key, given=self.text(key), why=why))

    def sections(self, names: Iterable[str]) -> None:
        """Note that these are tables; one that is a value instead is wrong."""
        for name in names:
            if self.has(name):
                self.problems.append(
                    WRONG_TYPE.problem(
                        f"{name} = {self.text(name)} is not a table",
                        key=name,
                        set_by=self.where(name),
                        works=(f"no {name}",),
                    )
                )

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
            self.problems.append(
                IMPORT_NOT_HONOURED.problem(
                    f"{table} is refused: {why}",
                    key=table,
                    set_by=self.where(*keys),
                    works=(f"no {table}",),
                )
            )

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
        self.refuse(key, why, works=map(shown, allowed), setting=setting)
        return False

    def refuse(self, key: str, why: str, *, works: Iterable[str] = (), setting: str = "") -> None:
        """Refuse the value of a key by name."""
        what = f"{key} = {self.text(key)}" if key in self.given else f"{key} is not set"
        self.problems.append(
            IMPORT_NOT_HONOURED.problem(
                f"{what}: {why}",
                key=setting or key,
                set_by=self.where(key),
                works=(*works, f"no {key}") if key in self.given else works,
            )
        )

    def conflict(
        self, message: str, setting: str, set_by: str, works: Iterable[object] = ()
    ) -> None:
        """Note that two values cannot both hold."""
        self.problems.append(
            IMPORT_CONFLICT.problem(message, key=setting, set_by=set_by, works=works)
        )

    def finish(self) -> None:
        """Note keys without a value, and those that the tool does not have."""
        for key, value in self.given.items():
            if key in self.known and value in (None, {}):
                why = "null is no value" if value is None else "an empty table sets nothing"
                self.rows.append(Row(key=key, given=shown(value), why=why))
        self.problems.extend(self._unknown())

    def _unknown(self) -> Iterator[Problem]:
        for key in self.given:
            if key not in self.known:
                near = self._nearest(key)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield IMPORT_UNKNOWN_KEY.problem(
                    f"{key} is no key of {self.tool} that is known here{hint}",
                    key=key,
                    set_by=self.where(key),
                    works=near,
                )

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


def shown(value: object) -> str:
    """Return a value as JSON would have it."""
    return json.dumps(value, default=str)
