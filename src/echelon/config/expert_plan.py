"""What is wrong with the experts of a plan, or its latent attention, whoever made the plan.

What `ec.plan` makes has been checked with its settings. A plan may also be read from a file, or
changed in Python: its values are looked at as the settings that they would come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, cast

from echelon.config.checks import run_checks, tp_divides_ffn
from echelon.config.entries import Entry
from echelon.config.expert_balance import settings_without_experts
from echelon.config.expert_checks import MISFITS
from echelon.config.expert_settings import EXPERTS, MODEL_EXPERTS
from echelon.config.expert_travel import DISPATCH_KEY, TWO_HOP, why_not_two_hop
from echelon.config.experts import expert_tp, ranks_with_the_same_experts, require_experts
from echelon.config.kinds import toml_text
from echelon.config.model import experts_enough
from echelon.config.schema import SETTINGS
from echelon.config.tried import telling
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.expert_parallel import TWO_HOP_NEEDS_NODES

CHECKED = frozenset(one.key for one in (*EXPERTS, *MODEL_EXPERTS))
OF_MODEL = (
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "layers",
    "hidden",
    "gated",
    "activation",
    "positions",
    "mlp_bias",
    "qkv_bias",
    "output_bias",
    "qk_norm",
)


def expert_problems(plan: Plan) -> Iterator[Problem]:
    """Yield every problem of a plan's experts, of the ranks that hold them, and of their balance.

    A dense model has none, but for those of latent attention and for what is said of experts.
    """
    view = view_of_plan(plan)
    wrong = list(_values(view))
    yield from wrong or _misfits(view, plan)


def view_of_plan(plan: Plan) -> View:
    """Return the settings that decide about experts as a plan has them."""
    model, numbers, layout = plan.model, plan.mathematics, plan.layout
    found: dict[str, object] = {f"model.{name}": getattr(model, name) for name in OF_MODEL}
    found["model.name"] = model.name
    for part in ("experts", "latent"):
        found |= _under(f"model.{part}", getattr(model, part))
    found |= _under("mesh", layout.mesh)
    found |= _under("experts", numbers.balance) | _under("experts", layout.experts)
    found["experts.balance"] = found.pop("experts.kind")
    if numbers.balance.capacity_factor is None:
        found["experts.capacity_factor"] = "dropless"
    if model.experts is None and layout.experts.zero_stage == 0:
        found["experts.zero_stage"] = "auto"  # What it is where there are no experts.
    found["mesh.sequence_parallel"] = layout.sequence_parallel
    found["zero.stage"] = layout.zero.stage
    found["batch.global_sequences"] = numbers.global_sequences
    found["batch.sequence_length"] = numbers.sequence_length
    found["batch.microbatch_sequences"] = layout.microbatch_sequences
    found["context.kind"] = layout.context.kind
    if layout.context.kind == "ulysses-ring":
        found["context.ulysses_degree"] = layout.context.ulysses_degree
    return View(entries={key: Entry(value=value, source="") for key, value in found.items()})


def _under(table: str, record: object) -> dict[str, object]:
    if record is None:
        return {}
    names = [field.name for field in fields(cast(Any, record))]
    return {f"{table}.{name}": getattr(record, name) for name in names}


def _values(view: View) -> Iterator[Problem]:
    """Yield values that no setting takes."""
    for key, entry in view.entries.items():
        if key in CHECKED and (misfit := SETTINGS[key].kind.misfit(entry.value)) is not None:
            yield misfit.rule.problem(
                f"{key} = {toml_text(entry.value)} {misfit.message}", key=key, works=misfit.works
            )


def _misfits(view: View, plan: Plan) -> Iterator[Problem]:
    finds = (*MISFITS, settings_without_experts)
    checks = (experts_enough, tp_divides_ffn, *map(telling, finds), _two_hop_of(plan))
    for problem in run_checks(view, checks):
        yield replace(problem, set_by="")


def _two_hop_of(plan: Plan) -> Callable[[View], Iterator[Problem]]:
    """Return the check of two hops that looks at the cluster of a plan, which no setting names."""

    def check(view: View) -> Iterator[Problem]:
        require_experts(view)
        if view.word(DISPATCH_KEY) != TWO_HOP:
            return
        ranks_with_the_same_experts(view)
        why = why_not_two_hop(plan.mesh, expert_tp(view), plan.cluster.devices_per_node)
        if why:
            message = f'{DISPATCH_KEY} = "two-hop", but {why}'
            flat = f'{DISPATCH_KEY} = "flat"'
            yield TWO_HOP_NEEDS_NODES.problem(message, key=DISPATCH_KEY, works=(flat,))

    return check
