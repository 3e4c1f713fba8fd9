"""The weights of a model by what they are for, and what a rank's share of them takes at N.

Routed experts are apart: `ep` ranks share them out, and N tp / ep ranks hold the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters
from echelon.core.plan import ZeroStage
from echelon.cost.model_states import ModelStates, StatePrecision, model_states

ROUTED = "routed experts"


def weights_by_part(shape: ModelShape) -> Mapping[str, int]:
    """Return the number of weights of each part, those that a model has none of left out."""
    found: dict[str, int] = {}
    for spec in parameters(shape):
        part = _part(spec)
        found[part] = found.get(part, 0) + spec.numel
    return found


def states_of_rank(
    shape: ModelShape,
    stage: ZeroStage,
    degree: int,
    precision: StatePrecision,
    *,
    degrees: tuple[int, int, int] = (1, 1, 1),
) -> ModelStates:
    """Return the model states of one of tp x pp parts, over `degree` data ranks at a stage.

    `degrees` are tp, pp and ep. Stages are equal; routed experts are cut at the same stage, over
    the ranks that hold the same ones.
    """
    tp, pp, ep = degrees
    parts = weights_by_part(shape)
    routed = parts.get(ROUTED, 0)
    dense = model_states((sum(parts.values()) - routed) / (tp * pp), stage, degree, precision)
    alike = max(1, degree * tp // ep)
    experts = model_states(routed / (pp * ep), stage, alike, precision)
    return ModelStates(
        parameters=dense.parameters + experts.parameters,
        gradients=dense.gradients + experts.gradients,
        optimizer=dense.optimizer + experts.optimizer,
    )


def _part(spec: ParameterSpec) -> str:
    if spec.expert is not None:
        return ROUTED
    if spec.name == EMBEDDING or spec.name.startswith("positions"):
        return "embedding"
    if spec.name == HEAD:
        return "head"
    if len(spec.shape) == 1 or "norm" in spec.name:
        return "norms and biases"
    if ".router." in spec.name or ".shared." in spec.name:
        return "routers, shared"
    return "MLPs" if ".mlp." in spec.name else "attention"
