"""The oracle: the same training on one device, plain enough to be believed by reading it.

One process, the plain decoder, autograd, the whole global batch at once; the loss is the sum over
valid tokens divided by their number; the norm is over everything; the optimizer is a formula.

In mixed precision the values are kept in the master dtype, the model is built from their rounding
to the parameters' dtype, and gradients are summed as the plan says: over microbatches in the
gradients' dtype, then over replicas in that of the reduction.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.initial import initial_values
from echelon.models.operations import Operations
from echelon.models.precision import widened
from echelon.prove.batches import global_batch
from echelon.prove.formulas import LossScale, clip_scale, global_norm, learning_rate
from echelon.prove.kernel_rounding import KernelOperations
from echelon.prove.optimizers import State, Update, update
from echelon.prove.oracle_routing import RoutedLayer, RoutingLosses, RoutingState, routing_losses
from echelon.prove.subject import GlobalBatch
from echelon.prove.told_routing import ToldKernelOperations, ToldOperations, ToldStep

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

Slot = tuple[int, int]
"""(data-parallel rank, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleStep:
    """Hold all that one device computed in one optimizer step.

    `before` and `after` are the values that the optimizer keeps (the master copy, where there is
    one), `gradients` those of the mean loss before clipping, `updates` what the optimizer added,
    in its two parts. `loss_scale` is what the loss was multiplied by before backward; a step that
    is `skipped`, for its gradients overflowed, changes nothing. `routed` says how each layer with
    experts routed the tokens, `routing` what it knew of the steps before, and `routing_after` what
    the next one knows. `told` is how it was told to route them, if it was.
    """

    step: int
    loss: float
    tokens: int
    microbatch_losses: Mapping[Slot, tuple[float, int]]
    before: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    grad_norm: float
    clip_scale: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    updates: Mapping[str, Update]
    after: Mapping[str, torch.Tensor]
    routing: RoutingState
    routing_after: RoutingState
    routed: Mapping[int, RoutedLayer]
    told: ToldStep | None = None


def run_oracle(
    plan: Plan,
    num_steps: int,
    *,
    factor: float = 1.0,
    told: Sequence[ToldStep] | None = None,
) -> tuple[OracleStep, ...]:
    """Return the steps of `plan` on one device, in the plan's own precision.

    The loss is multiplied by `factor` before backward, and gradients are divided by it: the same
    numbers, but for how they are rounded. Tokens go to the experts that are `told`, by step, if
    they are.
    """
    master = TORCH_DTYPES[plan.mathematics.precision.master]
    values = {name: value.to(master) for name, value in initial_parameters(plan).items()}
    states = {name: State() for name in values}
    scale = LossScale.start(plan.mathematics.precision)
    routing = RoutingState.start(plan, TORCH_DTYPES[plan.mathematics.precision.parameters])
    steps: list[OracleStep] = []
    for step in range(num_steps):
        before = _Before(step, values, states, scale.scale, routing, told[step] if told else None)
        steps.append(_step(plan, before, factor))
        routing = steps[-1].routing_after
        scale.follow(plan.mathematics.precision, overflow=steps[-1].skipped)
        values = dict(steps[-1].after)
    return tuple(steps)


def initial_parameters(plan: Plan) -> dict[str, torch.Tensor]:
    """Return the first values of all parameters, in forward order."""
    seed = plan.mathematics.seed
    return {spec.name: initial_values(plan.model, spec, seed) for spec in parameters(plan.model)}


def build_decoder(
    plan: Plan,
    values: Mapping[str, torch.Tensor],
    operations: Operations | None = None,
    *,
    routing: RoutingState | None = None,
    told: ToldStep | None = None,
) -> Decoder:
    """Return the whole model on one device, holding `values`, in the plan's parameter dtype.

    Its routers know of the steps before what `routing` says: nothing, before the first. They send
    tokens where they are `told` to, if they are.
    """
    dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
    if operations is None:
        operations = _operations(dtype, told=told is not None)
    model = Decoder(plan.model, operations=operations).to(dtype)
    model.operations.routing = (routing or RoutingState.start(plan, dtype)).notes(plan, told)
    own = dict(model.named_parameters())
    assert own.keys() == values.keys(), "the decoder and the table of parameters differ"
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])
    return model


def _operations(dtype: torch.dtype, *, told: bool) -> Operations:
    if dtype == torch.float64:
        return ToldOperations() if told else Operations()
    return ToldKernelOperations() if told else KernelOperations()


def token_losses(plan: Plan, model: Decoder, batch: GlobalBatch, step: int) -> torch.Tensor:
    """Return the loss of each token, [B, T]; 0 where the label is not counted."""
    tokens = TokenBatch.from_rows(
        batch.inputs_BT,
        batch.labels_BT,
        torch.tensor(batch.sample_ids, dtype=torch.int64),
        step=step,
        seed=plan.mathematics.seed,
    ).cut((), batch.documents)
    x_ND = model.norm(model.hidden(None, tokens))
    return _head_losses(model, x_ND, tokens)


def _head_losses(model: Decoder, x_ND: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    logits_NV = widened(model.operations.logits(x_ND, model.head_weight))
    losses_N = fn.cross_entropy(
        logits_NV, tokens.labels_N, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses_N.view(tokens.num_positions, tokens.num_sequences).t()


def sums_by_slot(
    plan: Plan, batch: GlobalBatch, losses_BT: torch.Tensor
) -> dict[Slot, tuple[torch.Tensor, int]]:
    """Return, for each microbatch of each replica, the sum of its token losses and their number."""
    size = plan.layout.microbatch_sequences
    valid_BT = batch.labels_BT != IGNORED_LABEL
    result: dict[Slot, tuple[torch.Tensor, int]] = {}
    for dp_rank in range(plan.mesh.dp):
        for microbatch in range(plan.num_microbatches):
            start = (dp_rank * plan.num_microbatches + microbatch) * size
            rows = slice(start, start + size)
            result[dp_rank, microbatch] = losses_BT[rows].sum(), int(valid_BT[rows].sum())
    return result


def contributions(plan: Plan, oracle: OracleStep) -> dict[Slot, dict[str, torch.Tensor]]:
    """Return each microbatch's part of the gradient; all parts add up to the whole."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, told=oracle.told)
    batch = global_batch(plan, oracle.step)
    sums = sums_by_slot(plan, batch, token_losses(plan, model, batch, oracle.step))
    routed = routing_losses(plan, model.operations.routing, oracle.routing)
    beside = _beside_by_slot(plan, routed)
    parts: dict[Slot, dict[str, torch.Tensor]] = {}
    for slot, (total, _) in sums.items():
        model.zero_grad(set_to_none=True)
        (total / oracle.tokens + beside.get(slot, 0.0)).backward(retain_graph=True)
        parts[slot] = _gradients(model)
    return parts


@dataclass(frozen=True, slots=True)
class _Before:
    """What a step begins with."""

    step: int
    values: Mapping[str, torch.Tensor]
    states: Mapping[str, State]
    loss_scale: float
    routing: RoutingState
    told: ToldStep | None


def _beside_by_slot(plan: Plan, routed: RoutingLosses) -> dict[Slot, torch.Tensor]:
    """Return what routers add to the loss of each microbatch of each replica, if anything."""
    if routed.gradient_B is None:
        return {}
    size = plan.layout.microbatch_sequences
    sums = routed.gradient_B.unflatten(0, (-1, size)).sum(-1)
    return {divmod(index, plan.num_microbatches): sums[index] for index in range(len(sums))}


def _step(plan: Plan, before: _Before, factor: float) -> OracleStep:
    step, values, states = before.step, before.values, before.states
    optimizer, precision = plan.mathematics.optimizer, plan.mathematics.precision
    model = build_decoder(plan, values, routing=before.routing, told=before.told)
    batch = global_batch(plan, step)
    sums = sums_by_slot(plan, batch, token_losses(plan, model, batch, step))
    routed = routing_losses(plan, model.operations.routing, before.routing)
    beside = _beside_by_slot(plan, routed)
    count, scale = sum(number for _, number in sums.values()), before.loss_scale * factor
    losses = {s: total * (scale / count) for s, (total, _) in sums.items()}
    losses = {s: loss + beside[s] * scale if beside else loss for s, loss in losses.items()}
    scaled = _summed_gradients(plan, model, losses)
    norm = global_norm(scaled) / scale
    skipped = precision.loss_scaling != "none" and not math.isfinite(norm)
    clip, rate = clip_scale(norm, optimizer.clip_norm), learning_rate(optimizer, step)
    if skipped:
        updates = {name: Update.none(value) for name, value in values.items()}
    else:
        specs = {spec.name: spec for spec in parameters(plan.model)}
        updates = {
            name: update(
                specs[name],
                value,
                scaled[name].to(value.dtype) * (clip / scale),
                states[name],
                optimizer,
                rate,
            )
            for name, value in values.items()
        }
    return OracleStep(
        step=step,
        loss=sum(float(total.detach()) for total, _ in sums.values()) / count,
        tokens=count,
        microbatch_losses={slot: (float(total.detach()), n) for slot, (total, n) in sums.items()},
        before=dict(values),
        gradients={name: widened(gradient) / scale for name, gradient in scaled.items()},
        grad_norm=norm,
        clip_scale=clip,
        learning_rate=rate,
        loss_scale=before.loss_scale,
        skipped=skipped,
        routing=before.routing,
        routing_after=before.routing if skipped else before.routing.after(plan, routed.layers),
        routed=routed.layers,
        told=before.told,
        updates=updates,
        after={name: value + updates[name].total for name, value in values.items()},
    )


def _summed_gradients(
    plan: Plan, model: Decoder, losses: Mapping[Slot, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradient of the sum of all losses, added up in the plan's dtypes."""
    precision = plan.mathematics.precision
    added, reduced = TORCH_DTYPES[precision.gradients], TORCH_DTYPES[precision.reduction]
    if precision.parameters == precision.gradients == precision.reduction in ("fp64", "fp32"):
        torch.stack(list(losses.values())).sum().backward()
        return _gradients(model)
    replicas: dict[int, dict[str, torch.Tensor]] = {}
    for (dp_rank, _), loss in losses.items():
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        replica = replicas.setdefault(dp_rank, {})
        for name, gradient in _gradients(model).items():
            part = gradient.to(added)
            replica[name] = replica[name] + part if name in replica else part
    whole: dict[str, torch.Tensor] = {}
    for replica in replicas.values():
        for name, gradient in replica.items():
            part = gradient.to(reduced)
            whole[name] = whole[name] + part if name in whole else part
    return {name: gradient.to(added) for name, gradient in whole.items()}


def _gradients(model: Decoder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"the oracle has no gradient of {name}"
        result[name] = parameter.grad.detach().clone()
    return result
