"""The order in which the sequences of a module are cut over context ranks.

see the attention of the whole module -> replace it -> compare the cut module with the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from echelon.core.axis import Axis
from echelon.core.errors import ConfigError
from echelon.core.rulebook.module_context import MODULE_ATTENTION
from echelon.parallel.module.context.attention import AttentionCall, CutAttention, SeenAttention
from echelon.parallel.module.context.sequences import SequenceCut
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.module import RankModule
from echelon.parallel.module.pipeline.trace import leaving_no_trace

_PRECISION = 0.6
"""Outputs differ by less than the spacing of numbers to this power, of the largest of them."""


class ModuleContext:
    """Run a module over the positions of this rank."""

    def __init__(self, module: RankModule, cut: SequenceCut, calls: list[AttentionCall]) -> None:
        """Replace the attention that was seen."""
        self._module, self.cut, self.calls = module, cut, calls
        self._mode = CutAttention(module.plan, module.groups, module.passes.store, calls)

    def __call__(self, **inputs: Any) -> Any:
        """Return what the module gives for this rank's positions."""
        self._mode.begin()
        with self._mode:
            output = self._module.model(**inputs)
        self._mode.end()
        return output


def apply_context(module: RankModule, loss: ModuleLoss, example: Batch) -> ModuleContext:
    """Cut the sequences of a module; ConfigError where its outputs are not those of the whole.

    All ranks do so together; `example` is a microbatch of the plan's length.
    """
    plan, groups = module.plan, module.groups
    cut = SequenceCut(plan, module.model, plan.mesh.coordinates(groups.rank)[Axis.CP])
    prepared = loss.prepare(
        {n: o.to(module.device) if isinstance(o, torch.Tensor) else o for n, o in example.items()}
    )
    seen = SeenAttention()
    with leaving_no_trace(module.model), torch.no_grad():
        with seen:
            expected = _tensors(module.model(**loss.inputs(cut.whole(prepared))))
        if not seen.calls:
            raise _unfit("the module makes no call of scaled_dot_product_attention")
        degree = plan.layout.context.ulysses_degree
        if odd := [one for one in seen.calls if one.heads % degree]:
            raise _unfit(f"{odd[0].heads} heads are not shared out over {degree} ranks")
        context = ModuleContext(module, cut, seen.calls)
        found = _tensors(context(**loss.inputs(cut.cut(prepared))))
    wrong = _difference(found, [cut.rows(one) for one in expected])
    # What one rank finds ends all of them: another one may have rows that are right.
    for rank, said in enumerate(groups.world.gather_objects(wrong)):
        if said:
            raise _unfit(
                f"the outputs of rank {rank} are not those of the whole module: {said}. Something "
                "besides attention depends on other positions, or on their number"
            )
    return context


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the first tensor of an output that has positions."""
    leaves = tree_flatten(output)[0]
    found = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 1]
    if not found:
        raise _unfit("the module gives no tensor [B, T, ...]")
    return found[:1]


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return f"{tuple(one.shape)}, not {tuple(other.shape)}"
        limit = torch.finfo(other.dtype).eps ** _PRECISION * float(other.abs().max())
        if not (worst := float((one - other).abs().max())) <= limit:
            return f"they differ by {worst:.3g}"
    return ""


def _unfit(why: str) -> ConfigError:
    return ConfigError(
        MODULE_ATTENTION.problem(
            why, key="mesh.cp", suggestions=('attn_implementation="sdpa"', "mesh.cp = 1")
        )
    )
