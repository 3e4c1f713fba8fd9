# SPDX-License-Identifier: Apache-2.0
"""In which order backward writes gradients of weights: by operator, with what is put off.

Over tensor ranks the product of a row-parallel layer waits for the collective of the column layer
before it; under sequence parallelism that of a column layer waits for the next gather. Where
attention or experts send something, products run while that is under way (`parallel/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, is_adapter
from echelon.core.plan import Plan
from echelon.cost.activations.attention import ATTENTION
from echelon.cost.activations.expert_numbers import has_grouped_products
from echelon.cost.activations.experts import DISPATCH, EXPERTS, ROUTER, SHARED
from echelon.cost.activations.linear import DOWN
from echelon.cost.activations.units import UnitOperators
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD, unit_of

OperatorKey = tuple[str, str]
"""A unit and an operator of it; ("", "") is the end of the pass."""

END: OperatorKey = ("", "")

_OF_PARTS: Mapping[str, str] = {
    "attention_norm": "attention norm",
    "mlp_norm": "mlp norm",
    "attention_post_norm": "attention post norm",
    "mlp_post_norm": "mlp post norm",
    "attention.q": "q, k, v",
    "attention.k": "q, k, v",
    "attention.v": "q, k, v",
    "attention.q_norm": "heads",
    "attention.k_norm": "heads",
    "attention.sinks": "attention",
    "attention.o": "o",
    "attention.q_down": "q_down, kv_down",
    "attention.kv_down": "q_down, kv_down",
    "attention.q_up": "q_up",
    "attention.kv_up": "kv_up",
    "mlp.gate": "gate, up",
    "mlp.up": "gate, up",
    "mlp.down": DOWN,
}
"""The operator of a part of a block, but for experts."""

_COLUMNS = frozenset({"q, k, v", "gate, up", "q_up", "kv_up"})
_ROWS = frozenset({"o", DOWN})
_ALIKE = frozenset({"q_down, kv_down"})
"""Layers that every tensor rank has whole."""


def operator_of(plan: Plan, spec: ParameterSpec) -> str:
    """Return the operator whose backward writes the gradient of a parameter."""
    if spec.layer is None:
        ends = {EMBEDDING: UNIT_EMBEDDING, HEAD: "loss", "positions.weight": "positions"}
        return ends.get(spec.name, "last norm")
    if spec.expert is not None:
        return EXPERTS
    part = spec.name.split(".", 2)[2].rsplit(".", 1)[0]
    if is_adapter(spec.name):
        part = part.rpartition(".")[0]
    if part.startswith("mlp.shared."):
        return SHARED
    if part in ("mlp.router", "mlp.logit_bias"):
        return ROUTER
    if plan.model.latent is not None and part in ("attention.q_norm", "attention.kv_norm"):
        return part.removeprefix("attention.")
    return _OF_PARTS[part]


def writes_at_end(operator: str, *, fused_norm: bool) -> bool:
    """Return whether an operator writes its gradient when what it works with is gone: a norm.

    One that is a kernel has its partial sums until their sum is written.
    """
    return operator.endswith("norm") and not fused_norm


class WeightOrder:
    """Say which gradients backward of a stage writes at each of its operators."""

    def __init__(
        self, plan: Plan, units: Sequence[UnitOperators], specs: Sequence[ParameterSpec]
    ) -> None:
        """Take the units of a stage and the parameters that it uses."""
        self._tensor = plan.mesh.tp > 1
        self._scattered = self._tensor and plan.layout.sequence_parallel
        self._sent = plan.mesh.cp > 1
        grouped = plan.model.experts is not None and has_grouped_products(plan)
        self._experts_put_off = self._tensor or plan.mesh.ep > 1 or grouped
        experts = plan.model.experts
        self._shared = experts is not None and experts.shared_experts > 0
        self._chunks = plan.layout.experts.chunks
        self._units, self._of_operators = units, _by_operator(plan, units, specs)

    @cached_property
    def whole(self) -> dict[OperatorKey, list[str]]:
        """Return what each operator of a whole backward pass writes."""
        return _listed(self._walk(self._units, self._of_operators, split=False))

    @cached_property
    def by_operator(self) -> dict[OperatorKey, list[str]]:
        """Return what W writes of each operator."""
        return _listed(self._walk(self._units, self._of_operators, split=True))

    def _walk(
        self,
        units: Sequence[UnitOperators],
        by_operator: Mapping[OperatorKey, Sequence[str]],
        *,
        split: bool,
    ) -> Iterator[tuple[OperatorKey, str]]:
        """Yield each gradient with the operator at which it is written."""
        queue: list[str] = []
        for unit in reversed(units):
            for operator in reversed(unit.operators):
                key = (unit.name, operator.name)
                own = [*by_operator.get(key, ())]
                if operator.name == EXPERTS:
                    own = own * self._chunks
                if split:
                    yield from ((key, name) for name in own)
                    continue
                if self._runs_before(operator.name):
                    yield from ((key, name) for name in queue)
                    queue = []
                if self._puts_off(operator.name):
                    queue += own
                    own = []
                if self._runs_after(operator.name):
                    yield from ((key, name) for name in queue)
                    queue = []
                yield from ((key, name) for name in own)
        yield from ((END, name) for name in queue)

    def _runs_before(self, operator: str) -> bool:
        """Return whether an operator begins with what was put off."""
        if operator in _ROWS or operator in _COLUMNS:
            return self._scattered
        sends = operator == ATTENTION and self._sent
        shared = operator == SHARED and self._shared
        return sends or shared or operator in (DISPATCH, "loss")

    def _puts_off(self, operator: str) -> bool:
        if operator in _ROWS:
            return self._tensor or (operator == "o" and self._sent)
        if operator in _COLUMNS:
            return self._scattered
        if operator == EXPERTS:
            return self._experts_put_off
        return operator in (*_ALIKE, SHARED) and self._tensor

    def _runs_after(self, operator: str) -> bool:
        """Return whether an operator ends with what was put off, its own or that of others."""
        return operator in _COLUMNS and not self._scattered


def _listed(found: Iterator[tuple[OperatorKey, str]]) -> dict[OperatorKey, list[str]]:
    listed: dict[OperatorKey, list[str]] = {}
    for key, name in found:
        listed.setdefault(key, []).append(name)
    return listed


def _by_operator(
    plan: Plan, units: Sequence[UnitOperators], specs: Sequence[ParameterSpec]
) -> dict[OperatorKey, list[str]]:
    found: dict[OperatorKey, list[str]] = {}
    here = {unit.name for unit in units}
    for spec in specs:
        if spec.frozen:
            continue
        if spec.name == EMBEDDING:
            if UNIT_EMBEDDING in here:
                found.setdefault((UNIT_EMBEDDING, UNIT_EMBEDDING), []).append(spec.name)
            if plan.model.tied and UNIT_HEAD in here:
                found.setdefault((UNIT_HEAD, "loss"), []).append(spec.name)
            continue
        unit = unit_of(spec.name) if spec.layer is None else f"layers.{spec.layer}"
        key = (unit, operator_of(plan, spec))
        found.setdefault(key, []).append(spec.name)
    return found
