"""Which choices of a search are legal: asked of the checks of `config/`, one degree at a time.

No rule stands here. A check reads settings; here it gets those of the run with the degrees in
question, and what it tells is kept as the id of its rule. What each plan of an answer is made of
is checked once more, as a whole, when it becomes a Plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import cast

from echelon.config.checks import (
    sequence_parallel_divides_sequence,
    tp_divides_ffn,
    tp_divides_heads,
    tp_divides_kv_heads,
)
from echelon.config.context import cuts_groups, cuts_heads, cuts_sequence
from echelon.config.entries import Entry
from echelon.config.expert_mesh import ep_divides_experts, expert_tp_divides_ffn
from echelon.config.view import View
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.core.rulebook.context import (
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)

TENSOR_CHECKS = (tp_divides_heads, tp_divides_kv_heads, tp_divides_ffn)
CONTEXT_RULES: tuple[tuple[Callable[[View], bool], str], ...] = (
    (cuts_groups, ULYSSES_DIVIDES_CP.id),
    (cuts_heads, ULYSSES_DIVIDES_HEADS.id),
    (cuts_sequence, CONTEXT_DIVIDES_SEQUENCE.id),
)


class Legality:
    """Answer for one model and batch which degrees may be, with the rule where one may not."""

    def __init__(self, plan: Plan) -> None:
        """Keep what the checks read of the model and the batch."""
        model = asdict(plan.model)
        experts = cast("dict[str, object]", model.pop("experts") or {})
        values = {f"model.{key}": value for key, value in model.items() if value is not None}
        values |= {f"model.experts.{key}": value for key, value in experts.items()}
        values["batch.sequence_length"] = plan.mathematics.sequence_length
        values["batch.global_sequences"] = plan.mathematics.global_sequences
        self._view = View(entries={k: Entry(value=v, source="") for k, v in values.items()})
        self.tensor = lru_cache(maxsize=None)(self._tensor)
        self.sequence = lru_cache(maxsize=None)(self._sequence)
        self.context = lru_cache(maxsize=None)(self._context)
        self.experts = lru_cache(maxsize=None)(self._experts)

    def _tensor(self, tp: int) -> str | None:
        """Return the rule that a tensor degree breaks."""
        view = self._with({"mesh.tp": tp})
        return _first(problem.rule for check in TENSOR_CHECKS for problem in check(view))

    def _sequence(self, tp: int, cp: int) -> str | None:
        """Return the rule that sequence parallelism over so many ranks breaks."""
        view = self._with({"mesh.tp": tp, "mesh.cp": cp, "mesh.sequence_parallel": True})
        return _first(problem.rule for problem in sequence_parallel_divides_sequence(view))

    def _context(self, tp: int, cp: int, kind: str, ulysses: int) -> str | None:
        """Return the rule that a way for context ranks to meet breaks."""
        degree = ulysses if kind == "ulysses-ring" else "auto"
        settings = {"mesh.tp": tp, "mesh.cp": cp, "context.kind": kind}
        view = self._with(settings | {"context.ulysses_degree": degree})
        return _first(rule for holds, rule in CONTEXT_RULES if not holds(view))

    def _experts(self, tp: int, ep: int, expert_tp: int) -> str | None:
        """Return the rule that a way to share out experts breaks."""
        view = self._with({"mesh.tp": tp, "mesh.ep": ep, "experts.expert_tp": expert_tp})
        checks = (ep_divides_experts, expert_tp_divides_ffn)
        return _first(fault.rule.id for check in checks for fault in check(view))

    def _with(self, settings: Mapping[str, object]) -> View:
        entries = {key: Entry(value=value, source="") for key, value in settings.items()}
        return replace(self._view, entries={**self._view.entries, **entries})


def folded_degree(mesh: Mesh, expert_tp: int) -> int:
    """Return among how many ranks of one replica experts are shared out."""
    return mesh.degree(*mesh.expert_fold(expert_tp=expert_tp))


def _first(rules: Iterable[str]) -> str | None:
    return next(iter(rules), None)
