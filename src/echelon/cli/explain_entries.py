"""What `echelon explain ID` can show beside pages: rules, lints, and claims of guides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.cli.explain_errata import claim_json, claim_page
from echelon.cli.explain_lints import lint_json, lint_page
from echelon.core.rulebook import all_rules
from echelon.core.serialize import to_json
from echelon.planner.errata.claims import all_claims
from echelon.planner.lint import LINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold what is shown of one id: under which `kind` in JSON, its values, and its page."""

    kind: str
    values: Callable[[], Mapping[str, Any]]
    page: Callable[[], str]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return {self.kind: self.values(), "page": self.page()}


def entries() -> dict[str, Entry]:
    """Return everything that has an id."""
    found: dict[str, Entry] = {}
    for rule in all_rules():
        found[rule.id] = Entry(kind="rule", values=lambda r=rule: to_json(r), page=rule.page)
    for each in LINTS:
        found[each.id] = Entry(
            kind="lint", values=lambda x=each: lint_json(x), page=lambda x=each: lint_page(x)
        )
    for claim in all_claims():
        found[claim.id] = Entry(
            kind="claim", values=lambda c=claim: claim_json(c), page=lambda c=claim: claim_page(c)
        )
    return found
