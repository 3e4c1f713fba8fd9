"""Settings follow from fields of records, their types and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.serialize import from_json, to_json
from echelon.core.settings.configured import Configured, settings_of
from echelon.core.settings.value_types import COUNT, POSITIVE, Choice, Flag, Integer

OVERLAP = Integer(words=("auto",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven:
    """A record with fields of a run file, and one without."""

    heat: Annotated[float, Configured("degrees")] = 200.0
    loaves: Annotated[int, Configured("bread", path=True)]
    kind: Annotated[Literal["gas", "wood"], Configured("fuel", name="fuel")] = "gas"
    update: Annotated[Annotated[str, OPTIMIZERS], Configured("rule", after="heat")] = "adamw"
    door: Annotated[bool, Configured("open", default=True)] = False
    ranks: Annotated[int, Configured("beside", OVERLAP, default="auto", table="mesh")] = 1
    serial: int = 0


def test_what_follows_from_a_field_is_not_said_again() -> None:
    found = {one.key: one for one in settings_of(Oven, "oven")}
    assert list(found) == ["oven.heat", "oven.update", "oven.loaves", "oven.fuel", "oven.door"]
    assert [one.default for one in found.values()] == [200.0, "adamw", None, "gas", True]
    kinds = [POSITIVE, Choice(options=OPTIMIZERS), COUNT, Choice(options=("gas", "wood")), Flag()]
    assert [one.kind for one in found.values()] == kinds
    assert found["oven.loaves"].path
    assert found["oven.heat"].about == "degrees"


def test_a_field_may_be_of_another_table() -> None:
    (ranks,) = settings_of(Oven, "mesh", "ranks")
    assert (ranks.key, ranks.kind, ranks.default) == ("mesh.ranks", OVERLAP, "auto")


def test_a_configured_field_is_read_back() -> None:
    oven = Oven(loaves=3, kind="wood")
    assert from_json(Oven, to_json(oven)) == oven
