"""`echelon explain`: say why a rule exists, with an example that breaks it and one that works."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.output import print_json
from echelon.core.errors import ConfigError
from echelon.core.rulebook import areas
from echelon.core.rulebook.command_line import UNKNOWN_RULE
from echelon.core.rules import Rule, did_you_mean
from echelon.core.serialize import to_json

LIST_WIDTH = 120


def explain(
    rule: Annotated[str | None, Parameter(help="The id in the brackets of an error.")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Explain a rule; without one, list all of them by area."""
    by_area = areas()
    if rule is None:
        _list(by_area, as_json=json)
        return 0
    known = {entry.id: entry for rules in by_area.values() for entry in rules}
    if rule not in known:
        near = did_you_mean(rule, known)
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {rule!r}", works=near))
    if json:
        print_json("explain", {"rule": to_json(known[rule]), "page": known[rule].page()})
    else:
        print(known[rule].page(), end="")
    return 0


def _list(by_area: Mapping[str, tuple[Rule, ...]], *, as_json: bool) -> None:
    if as_json:
        ids = {area: [rule.id for rule in rules] for area, rules in by_area.items()}
        print_json("explain", {"areas": ids})
        return
    width = max(len(rule.id) for rules in by_area.values() for rule in rules)
    for area, rules in by_area.items():
        print(area.replace("_", " "))
        for rule in rules:
            line = f"  {rule.id:<{width}}  {_first_sentence(rule.why)}"
            print(
                line if len(line) <= LIST_WIDTH else line[: LIST_WIDTH - 4].rstrip(" ,:") + " ..."
            )
        print()


def _first_sentence(text: str) -> str:
    words = " ".join(cleandoc(text).split())
    end = words.find(". ")
    return words if end < 0 else words[: end + 1]
