# SPDX-License-Identifier: Apache-2.0
"""The oracle's decoder beside the same model of transformers: every token's loss, every gradient.

Both have the oracle's weights before a step and its global batch; the gradients are those of the
mean loss over the counted tokens, without what routers add. The first and the last step are taken.

transformers rounds some things to float32 whatever the dtype of the model: rotary tables and their
frequencies, the mean square of norms, softmax, router scores. Each of these is a call that names
float32, so `InFloat64` has them computed in float64 by changing that argument of the call, as long
as it is entered. No code of transformers is replaced.

A model with adapters is one that has none, with W' = W + s B A: the gradient of A is s B^T dW' and
that of B is s dW' A^T.

Shape suffixes: B sequences, T positions, N = T * B, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.nn import functional as fn
from torch.overrides import TorchFunctionMode

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape, parameters, router_biases
from echelon.core.plan import Plan
from echelon.interop.weight_names.names import find_naming
from echelon.interop.weight_names.source import ParameterSource
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.claims.checks import Check, relative_error
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.independent import attention, decoder, mixture
from echelon.proof.independent.hugging_face.configuration import (
    TransformersModel,
    transformers_model,
)
from echelon.proof.independent.optimizers import norm_of
from echelon.proof.independent.parts import (
    LOSS,
    SAME,
    DifferentPart,
    NotingOperations,
    relative_difference,
)
from echelon.proof.independent.sequence import HEAD_UNIT, PartKey
from echelon.proof.independent.weights import has_experts
from echelon.proof.oracle.oracle import OracleStep, build_decoder, token_losses
from echelon.proof.subject import ProofBatch


def class_beside(plan: Plan) -> str:
    """Return the class of transformers that a plan's model is compared with; empty for none."""
    found = transformers_model(plan)
    return "" if missing() or isinstance(found, str) else found.model_class


def why_not_beside(plan: Plan) -> str:
    """Return why a plan's model is not compared with transformers; empty where it is."""
    found = transformers_model(plan)
    reason = missing() or (found if isinstance(found, str) else "")
    return reason and f"not compared with transformers: {reason}"


def transformers_checks(
    plan: Plan, steps: Sequence[OracleStep], batches: Sequence[ProofBatch]
) -> Iterator[Check]:
    """Compare losses and gradients of the first and the last step; nothing without a class."""
    if not class_beside(plan):
        return
    model = _built(plan)
    for number in sorted({0, len(steps) - 1}):
        theirs = _theirs(model, plan, steps[number], batches[number])
        yield from _step_checks(plan, steps[number], batches[number], theirs)


def _step_checks(
    plan: Plan, step: OracleStep, batch: ProofBatch, theirs: LossAndGradients
) -> Iterator[Check]:
    model = build_decoder(plan, step.before, routing=step.routing, rounding=step.rounding)
    losses_BT = token_losses(plan, model, batch, step.step)
    for row, sample in enumerate(batch.sample_ids):
        error = relative_error(losses_BT[row].detach(), theirs.losses_BT[row], 0.0)
        subject = f"token losses of sample {sample}"
        yield Check(step.step, subject, error, allowed=FLOAT64_TOLERANCE, position=row)
    (losses_BT.sum() / int((batch.labels_BT != IGNORED_LABEL).sum())).backward()
    own = dict(model.named_parameters())
    floor = FLOOR * norm_of(theirs.gradients)
    for position, name in enumerate(reversed(list(theirs.gradients)), start=len(losses_BT)):
        right, found = theirs.gradients[name], own[name].grad
        error = relative_error(torch.zeros_like(right) if found is None else found, right, floor)
        yield Check(step.step, name, error, allowed=FLOAT64_TOLERANCE, position=position)


def first_part_unlike_transformers(
    plan: Plan, step: OracleStep, batch: ProofBatch
) -> DifferentPart | None:
    """Return the first part of a forward pass that the shared code computes otherwise."""
    theirs = _theirs(_built(plan), plan, step, batch)
    noting = NotingOperations()
    model = build_decoder(plan, step.before, noting, routing=step.routing, rounding=step.rounding)
    with torch.no_grad():
        losses_BT = token_losses(plan, model, batch, step.step)
    num_sequences = len(batch.sample_ids)
    for (unit, part), right in theirs.parts.items():
        noted = noting.parts[noted_key(plan, noting.parts, unit, part)]
        found = noted.reshape(-1, num_sequences, right.shape[-1]).transpose(0, 1)
        error = relative_difference(found, right)
        if not error <= SAME:
            says = f"off by {error:.2g} beside transformers; all before it agrees"
            return DifferentPart(part, unit, says)
    error = relative_difference(losses_BT, theirs.losses_BT)
    if not error <= SAME:
        return DifferentPart(LOSS, HEAD_UNIT, f"off by {error:.2g} beside transformers")
    return None


def noted_key(plan: Plan, parts: Iterable[PartKey], unit: str, part: str) -> PartKey:
    """Return under which of the keys of `parts` our code notes a part of transformers."""
    if part == EMBEDDING_PART:
        return unit, decoder.EMBEDDING, 0
    if part == HEAD_PART:
        return HEAD_UNIT, decoder.HEAD, 0
    if part == ATTENTION_NORM:
        return unit, attention.NORM, 0
    if part == ATTENTION_PART:
        return unit, decoder.OUTPUT, 0
    if part != MLP_NORM and has_experts(plan.model, int(unit.removeprefix("layers."))):
        return unit, mixture.EXPERTS, 0
    kind = attention.NORM if part == MLP_NORM else decoder.OUTPUT
    return max(key for key in parts if key[:2] == (unit, kind))


def _built(plan: Plan) -> Any:
    description = transformers_model(plan)
    assert not isinstance(description, str), description
    return build(description)


def _theirs(model: Any, plan: Plan, step: OracleStep, batch: ProofBatch) -> LossAndGradients:
    rows = TokensAndLabels(inputs_BT=batch.inputs_BT, labels_BT=batch.labels_BT)
    if plan.model.lora is None:
        give_weights(model, plan.model, step.before, step.routing.biases)
        return loss_and_gradients(model, plan.model, rows)
    shape = base_shape(plan.model)
    give_weights(model, shape, merged(plan.model, step.before), step.routing.biases)
    found = loss_and_gradients(model, shape, rows)
    return replace(found, gradients=adapter_gradients(plan.model, step.before, found.gradients))


PACKAGE = "transformers"
OLDEST = 5  # major version
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Settings without kernels: a loop over experts, and attention as a softmax."""

EMBEDDING_PART = "embedding"
HEAD_PART = "head"
ATTENTION_NORM = "norm before attention"
ATTENTION_PART = "attention"
MLP_NORM = "norm before the MLP"
MLP_PART = "MLP"

PARTS = {
    "input_layernorm": ATTENTION_NORM,
    "ln_1": ATTENTION_NORM,
    "self_attn": ATTENTION_PART,
    "attention": ATTENTION_PART,
    "self_attention": ATTENTION_PART,
    "ln_attn": ATTENTION_NORM,
    "ln_mlp": MLP_NORM,
    "attn": ATTENTION_PART,
    "post_attention_layernorm": MLP_NORM,
    "ln_2": MLP_NORM,
    "mlp": MLP_PART,
}
"""The parts of a block in words, by the names of their modules."""

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAndLabels:
    """Hold rows of tokens and their labels; -100 is a label that does not count."""

    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAndGradients:
    """Hold the loss of every token, and the gradients of their mean by our names.

    `parts` is what each part made of the rows, by (unit, part), in the order of a forward pass.
    """

    losses_BT: torch.Tensor
    gradients: Values
    parts: Mapping[tuple[str, str], torch.Tensor]


class InFloat64(TorchFunctionMode):
    """Compute in float64 what a call of torch says is to be float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call, with float64 wherever it says float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def missing() -> str:
    """Return why nothing here can be used; empty where it can."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return "it is not installed"
    # Version 4 has other settings of rotary positions, and passes over those that it does not know.
    return "" if int(found.partition(".")[0]) >= OLDEST else f"it is {found}, and not {OLDEST}"


def build(description: TransformersModel) -> Any:
    """Return the model of transformers, in float64, with weights that are yet to be set."""
    package: Any = import_module(PACKAGE)
    with torch.random.fork_rng(devices=[]), InFloat64():
        config = getattr(package, description.config_class)(**description.settings, **PLAIN)
        return getattr(package, description.model_class)(config).double().eval()


def give_weights(
    model: Any, shape: ModelShape, weights: Values, biases: Mapping[int, torch.Tensor]
) -> None:
    """Copy weights, by our names, and biases of routers, by block, to a model of transformers."""
    state: dict[str, torch.Tensor] = model.state_dict()
    named = dict(weights)
    for spec in router_biases(shape):
        assert spec.layer is not None, "a router is in a block"
        named[spec.name] = biases[spec.layer]
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
        for name, source in _sources(shape, state).items():
            rows, indices = _rows(source, state[source.key], named[name].shape)
            rows[indices] = named[name].reshape(len(indices), -1).double() - source.offset
    unset = [name for name, tensor in model.named_parameters() if not tensor.isfinite().all()]
    assert not unset, f"weights that nothing was copied to: {unset}"


def loss_and_gradients(model: Any, shape: ModelShape, batch: TokensAndLabels) -> LossAndGradients:
    """Return what a model of transformers gives for rows of tokens."""
    parts: dict[tuple[str, str], torch.Tensor] = {}
    hooks = [_listen(module, key, parts) for key, module in _modules(model, shape.norm_place)]
    model.zero_grad()
    with InFloat64():
        logits_BTV: torch.Tensor = model(input_ids=batch.inputs_BT, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    parts[HEAD_PART, HEAD_PART] = logits_BTV.detach() / shape.multipliers.logits
    losses_BT = fn.cross_entropy(logits_BTV.mT, batch.labels_BT, reduction="none")
    (losses_BT.sum() / int((batch.labels_BT != -100).sum())).backward()
    found: dict[str, torch.Tensor] = {}
    own = dict(model.named_parameters())
    sources = _sources(shape, own)
    for spec in parameters(shape):
        source = sources[spec.name]
        gradient = own[source.key].grad
        gradient = torch.zeros_like(own[source.key]) if gradient is None else gradient
        rows, indices = _rows(source, gradient, spec.shape)
        found[spec.name] = rows[indices].reshape(spec.shape)
    return LossAndGradients(losses_BT=losses_BT.detach(), gradients=found, parts=parts)


def _sources(shape: ModelShape, tensors: Values) -> Mapping[str, ParameterSource]:
    naming = find_naming(shape, list(tensors))
    assert naming is not None, "transformers has other names for its weights"
    assert not naming.nameless, f"transformers has no place for {naming.nameless}"
    return naming.sources


def _rows(
    source: ParameterSource, stored: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, list[int]]:
    """Return the rows of a tensor of theirs, and which of them our parameter's are, in order."""
    rows = stored.view(-1, stored.shape[-1]) if stored.dim() > 1 else stored[:, None]
    if source.transposed:
        rows = rows[source.row : source.row + prod(shape[1:])].T
    runs = source.runs(0, shape[0])
    return rows, list(
        chain.from_iterable(range(r.there, r.there + r.count * r.step, r.step) for r in runs)
    )


def _modules(model: Any, norm_place: str) -> Iterable[tuple[tuple[str, str], Any]]:
    """Yield the modules of a model whose results are compared, with the unit and part of each."""
    base = model.base_model
    blocks = base.h if hasattr(base, "h") else base.layers
    for number, block in enumerate(blocks):
        for name, module in block.named_children():
            before = norm_place == "before" or PARTS.get(name) in (ATTENTION_PART, MLP_PART)
            if name in PARTS and before:
                yield (f"layers.{number}", PARTS[name]), module


def _listen(module: Any, key: tuple[str, str], parts: dict[tuple[str, str], torch.Tensor]) -> Any:
    def hear(_: Any, inputs: Any, y: Any) -> None:
        if key == ("layers.0", ATTENTION_NORM):
            parts[EMBEDDING_PART, EMBEDDING_PART] = inputs[0].detach()
        parts[key] = (y[0] if isinstance(y, tuple) else y).detach()

    return module.register_forward_hook(hear)


_A, _B = ".lora_a.weight", ".lora_b.weight"


def merged(shape: ModelShape, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the model with what adapters add, in float64, under its own names."""
    found = {name: one for name, one in values.items() if not name.endswith((_A, _B))}
    assert shape.lora is not None, "nothing to merge"
    for layer in _layers(values):
        product = values[layer + _B].double() @ values[layer + _A].double()
        found[f"{layer}.weight"] = found[f"{layer}.weight"].double() + shape.lora.scale * product
    return found


def adapter_gradients(
    shape: ModelShape, values: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of adapters, from those of the weights that they are merged into."""
    assert shape.lora is not None, "nothing is adapted"
    found: dict[str, torch.Tensor] = {}
    for layer in _layers(values):
        whole = shape.lora.scale * gradients[f"{layer}.weight"].double()
        found[layer + _A] = values[layer + _B].double().T @ whole
        found[layer + _B] = whole @ values[layer + _A].double().T
    return found


def _layers(values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    return (name.removesuffix(_A) for name in values if name.endswith(_A))
