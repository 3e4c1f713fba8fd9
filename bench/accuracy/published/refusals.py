"""Why a row cannot be predicted: a rule's id and what is wrong."""

from __future__ import annotations

from echelon.core.rules import Rule


class Refused(Exception):
    """A row cannot be predicted; `rule` says why."""

    def __init__(self, rule: Rule, message: str) -> None:
        """Keep the rule and what is wrong."""
        super().__init__(message)
        self.rule = rule
        self.message = message
