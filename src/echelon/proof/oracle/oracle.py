# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same training on one device, plain enough to be believed by reading it.

One process, the plain decoder, autograd, the whole global batch at once; the loss is the sum over
valid tokens divided by their number; the norm is over everything; the optimizer is a formula.

In mixed precision the values are kept in the master dtype, the model is built from their rounding
to the parameters' dtype, and gradients are summed as the plan says: over microbatches in the
gradients' dtype, then over replicas in that of the reduction.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, V vocabulary, W numbers of
a token (hidden, or experts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn import functional as fn

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.counter_random import initial_values
from echelon.models.decoder import Decoder, listen_to_boundaries
from echelon.models.operations import Operations
from echelon.models.precision import widened
from echelon.proof.evidence.run import ReferenceStep
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.fp8 import (
    Fp8Rounding,
    TensorMaxima,
    as_gathered,
    multiply_in_fp8,
)
from echelon.proof.oracle.operations import ForcedRouting, OracleOperations
from echelon.proof.oracle.optimizers import (
    OptimizerState,
    OracleLossScale,
    TensorUpdate,
    clip_scale,
    global_norm,
    learning_rate,
    update,
)
from echelon.proof.oracle.routing import RoutedLayer, RoutingState, routing_losses
from echelon.proof.subject import ProofBatch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

MicrobatchKey = tuple[int, int]
"""(data-parallel rank, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleStep(ReferenceStep):
    """Hold all that one device computed in one optimizer step."""

    tokens: int
    """Counted tokens of the global batch."""
    microbatch_losses: Mapping[MicrobatchKey, tuple[float, int]]
    """Sum of losses and counted tokens of each microbatch."""
    learning_rate: float
    """The learning rate of the step."""
    loss_scale: float
    """What the loss was multiplied by before backward."""
    updates: Mapping[str, TensorUpdate]
    """What the optimizer added, in its two parts."""
    routing: RoutingState
    """What routers knew of the steps before."""
    routing_after: RoutingState
    """What they know for the next step."""
    routed: Mapping[int, RoutedLayer]
    """How each layer with experts routed the tokens."""
    fp8_maxima: TensorMaxima = field(default_factory=TensorMaxima)
    """The largest numbers of the steps before, which scales of whole tensors come from."""
    fp8_maxima_after: TensorMaxima = field(default_factory=TensorMaxima)
    """Those that the next step looks back on."""
    forced_routing: ForcedRouting | None = None
    """Where it was made to send tokens, if it was."""
    activations: Activations = field(default_factory=dict[str, torch.Tensor])
    """What passed the boundaries between the parts of the model."""
    activation_gradients: Activations = field(default_factory=dict[str, torch.Tensor])
    """Gradients of the mean loss there, in the order of the backward pass."""

    @property
    def added(self) -> Mapping[str, torch.Tensor]:
        return {name: one.total for name, one in self.updates.items()}

    def parts_of_update(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.updates[name]
        return one.main.double(), one.decay.double()

    @property
    def rounding(self) -> Fp8Rounding:
        """Return how the step rounds to 8 bits."""
        return Fp8Rounding(maxima=self.fp8_maxima)


def run_oracle(
    plan: Plan,
    num_steps: int,
    *,
    factor: float = 1.0,
    forced: Sequence[ForcedRouting] | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> tuple[OracleStep, ...]:
    """Return the steps of `plan` on one device, in the plan's own precision.

    The loss is multiplied by `factor` before backward, and gradients are divided by it: the same
    numbers, but for how they are rounded. Tokens go to the experts that are `forced`, by step, if
    they are. It begins with other values than the plan's where `initial` has them.
    """
    run = OracleRun(plan, factor=factor, initial=initial)
    return tuple(run.step(step, forced[step] if forced else None) for step in range(num_steps))


class OracleRun:
    """One training on one device, step by step."""

    def __init__(
        self,
        plan: Plan,
        *,
        factor: float = 1.0,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Begin as `run_oracle` says."""
        precision = plan.mathematics.precision
        master = TORCH_DTYPES[precision.master]
        first = initial_parameters(plan) if initial is None else initial
        self.plan = plan
        self.values = {name: value.to(master) for name, value in first.items()}
        """What the optimizer keeps; somebody may change it between two steps."""
        self._factor = factor
        self._states = {name: OptimizerState() for name in self.values}
        self._scale = OracleLossScale.start(precision)
        self._routing = RoutingState.start(plan, TORCH_DTYPES[precision.parameters])
        self._maxima = TensorMaxima()

    def step(self, step: int, forced: ForcedRouting | None = None) -> OracleStep:
        """Return the next step; its tokens go where they are `forced` to, if they are."""
        before = _StepStart(
            step,
            self.values,
            self._states,
            self._scale.scale,
            self._routing,
            self._maxima,
            forced,
        )
        found = _step(self.plan, before, self._factor)
        self._routing, self._maxima = found.routing_after, found.fp8_maxima_after
        self._scale.follow(self.plan.mathematics.precision, overflow=found.skipped)
        self.values = dict(found.after)
        return found


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
    forced: ForcedRouting | None = None,
    rounding: Fp8Rounding | None = None,
) -> Decoder:
    """Return the whole model on one device, holding `values`, in the plan's parameter dtype.

    Its routers know of the steps before what `routing` says: nothing, before the first. They send
    tokens where they are `forced` to go, if they are. `rounding` is that of 8-bit numbers.
    """
    dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
    operations = operations or OracleOperations(rounds=dtype != torch.float64)
    model = Decoder(plan.model, operations=operations).to(dtype)
    model.operations.routing = (routing or RoutingState.start(plan, dtype)).routing_notes(
        plan, forced
    )
    multiply_in_fp8(model, values, plan.mathematics.precision, rounding or Fp8Rounding())
    own = dict(model.named_parameters())
    assert own.keys() == values.keys(), "the decoder and the table of parameters differ"
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])
            parameter.copy_(as_gathered(name, parameter, plan.mathematics.precision.int8_block))
    for spec in parameters(plan.model):
        own[spec.name].requires_grad_(not spec.frozen)
    return model


def token_losses(plan: Plan, model: Decoder, batch: ProofBatch, step: int) -> torch.Tensor:
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
    logits_NV = widened(model.logits(x_ND))
    losses_N = fn.cross_entropy(
        logits_NV, tokens.labels_N, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses_N.view(tokens.num_positions, tokens.num_sequences).t()


def sums_by_microbatch(
    plan: Plan, batch: ProofBatch, losses_BT: torch.Tensor
) -> dict[MicrobatchKey, tuple[torch.Tensor, int]]:
    """Return, for each microbatch of each replica, the sum of its token losses and their number."""
    size = plan.layout.microbatch_sequences
    valid_BT = batch.labels_BT != IGNORED_LABEL
    result: dict[MicrobatchKey, tuple[torch.Tensor, int]] = {}
    for index in range(plan.mesh.dp * plan.num_microbatches):
        rows = slice(index * size, (index + 1) * size)
        slot = divmod(index, plan.num_microbatches)
        result[slot] = losses_BT[rows].sum(), int(valid_BT[rows].sum())
    return result


def contributions(plan: Plan, oracle: OracleStep) -> dict[MicrobatchKey, dict[str, torch.Tensor]]:
    """Return each microbatch's part of the gradient; all parts add up to the whole."""
    model = build_decoder(
        plan,
        oracle.before,
        routing=oracle.routing,
        forced=oracle.forced_routing,
        rounding=oracle.rounding,
    )
    sums, beside, _ = _microbatch_losses(plan, model, oracle.step, oracle.routing)
    parts: dict[MicrobatchKey, dict[str, torch.Tensor]] = {}
    for slot, (total, _) in sums.items():
        model.zero_grad(set_to_none=True)
        (total / oracle.tokens + beside.get(slot, 0.0)).backward(retain_graph=True)
        parts[slot] = _gradients(model)
    return parts


def step_from_values(
    plan: Plan, oracle: OracleStep, values: Mapping[str, torch.Tensor], *, factor: float = 1.0
) -> OracleStep:
    """Return the step again, begun with other values; its updates are those of a first step."""
    master = TORCH_DTYPES[plan.mathematics.precision.master]
    begun = {name: value.to(master) for name, value in values.items()}
    states = {name: OptimizerState() for name in begun}
    scale, forced = oracle.loss_scale, oracle.forced_routing
    start = _StepStart(oracle.step, begun, states, scale, oracle.routing, oracle.fp8_maxima, forced)
    return _step(plan, start, factor)


@dataclass(frozen=True, slots=True)
class _StepStart:
    """What a step begins with."""

    step: int
    values: Mapping[str, torch.Tensor]
    states: Mapping[str, OptimizerState]
    loss_scale: float
    routing: RoutingState
    maxima: TensorMaxima
    forced: ForcedRouting | None


def _microbatch_losses(
    plan: Plan, model: Decoder, step: int, routing: RoutingState
) -> tuple[
    dict[MicrobatchKey, tuple[torch.Tensor, int]],
    dict[MicrobatchKey, torch.Tensor],
    Mapping[int, RoutedLayer],
]:
    """Run a model on a batch; return the sums of microbatches, what routers add, and routes."""
    batch = global_batch(plan, step)
    sums = sums_by_microbatch(plan, batch, token_losses(plan, model, batch, step))
    gradient_B, routed = routing_losses(plan, model.operations.routing, routing)
    if gradient_B is None:
        return sums, {}, routed
    beside = gradient_B.unflatten(0, (-1, plan.layout.microbatch_sequences)).sum(-1)
    return sums, dict(zip(sums, beside, strict=True)), routed


def _step(plan: Plan, before: _StepStart, factor: float) -> OracleStep:
    step, values, states = before.step, before.values, before.states
    optimizer, precision = plan.mathematics.optimizer, plan.mathematics.precision
    # Gradients are multiplied by the loss scale on ranks, too, before they are rounded.
    rounding = Fp8Rounding(factor=factor, maxima=before.maxima)
    model = build_decoder(
        plan, values, routing=before.routing, forced=before.forced, rounding=rounding
    )
    with hearing(model) as heard:
        sums, beside, routed = _microbatch_losses(plan, model, step, before.routing)
        count, scale = sum(number for _, number in sums.values()), before.loss_scale * factor
        losses = {s: total * (scale / count) for s, (total, _) in sums.items()}
        losses = {s: loss + beside[s] * scale if beside else loss for s, loss in losses.items()}
        scaled = _summed_gradients(plan, model, losses)
    norm = global_norm(scaled) / scale
    skipped = precision.loss_scaling != "none" and not math.isfinite(norm)
    clip, rate = clip_scale(norm, optimizer.clip_norm), learning_rate(optimizer, step)
    if skipped:
        updates = {name: TensorUpdate.none(value) for name, value in values.items()}
    else:
        specs = {spec.name: spec for spec in parameters(plan.model)}
        updates: dict[str, TensorUpdate] = {}
        for name, value in values.items():
            if specs[name].frozen:
                updates[name] = TensorUpdate.none(value)
                continue
            gradient = scaled[name].to(value.dtype) * (clip / scale)
            updates[name] = update(specs[name], value, gradient, states[name], optimizer, rate)
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
        routing_after=before.routing if skipped else before.routing.after(plan, routed),
        routed=routed,
        fp8_maxima=before.maxima,
        fp8_maxima_after=before.maxima.after(rounding.found, precision.fp8_history),
        forced_routing=before.forced,
        updates=updates,
        after={name: value + updates[name].total for name, value in values.items()},
        activations=with_routers(heard.forward, routed),
        activation_gradients={n: widened(dx) / scale for n, dx in heard.backward().items()},
    )


def _summed_gradients(
    plan: Plan, model: Decoder, losses: Mapping[MicrobatchKey, torch.Tensor]
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
        _add(replicas.setdefault(dp_rank, {}), _gradients(model), added)
    whole: dict[str, torch.Tensor] = {}
    for replica in replicas.values():
        _add(whole, replica, reduced)
    return {name: gradient.to(added) for name, gradient in whole.items()}


def _add(
    total: dict[str, torch.Tensor], parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    for name, value in parts.items():
        part = value.to(dtype)
        total[name] = total[name] + part if name in total else part


def _gradients(model: Decoder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, f"the oracle has no gradient of {name}"
        result[name] = parameter.grad.detach().clone()
    return result


def loss_of_sequences(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return what each sequence adds to the loss, [B]."""
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    loss_B = losses_BT.sum(1) / oracle.tokens
    beside_B, _ = routing_losses(plan, model.operations.routing, oracle.routing)
    return loss_B if beside_B is None else loss_B + beside_B


def loss_of_tokens(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return the loss without what routers add."""
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    return losses_BT.sum() / oracle.tokens


def whole_loss(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return all that its gradient is the gradient of."""
    return loss_of_sequences(plan, model, oracle).sum()


def router_loss_gradient(plan: Plan, oracle: OracleStep, name: str) -> torch.Tensor | None:
    """Return the part of a gradient that routers add; None where they add nothing."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    loss_of_tokens(plan, model, oracle)
    beside_B, _ = routing_losses(plan, model.operations.routing, oracle.routing)
    if beside_B is None:
        return None
    parameter = model.get_parameter(name)
    return torch.autograd.grad(beside_B.sum(), parameter, allow_unused=True)[0]


Activations = Mapping[str, torch.Tensor]
"""What passed each boundary, [B, T, W], in the order of the forward pass."""


@dataclass(slots=True)
class HeardActivations:
    """Hold what passed each boundary, [B, T, D], and the gradients there as far as they came."""

    forward: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def hear(self, name: str, x_ND: torch.Tensor, batch: TokenBatch) -> None:
        """Keep what passes a boundary; gradients that come in several parts add up."""
        count = batch.num_sequences
        self.forward[name] = _by_sequence(x_ND, count)

        def on_gradient(dx_ND: torch.Tensor) -> None:
            part = _by_sequence(dx_ND, count)
            before = self.gradients.get(name)
            self.gradients[name] = part if before is None else before + part

        if x_ND.requires_grad:
            x_ND.register_hook(on_gradient)

    def backward(self) -> Activations:
        """Return the gradients in the order of the backward pass."""
        names = (name for name in reversed(self.forward) if name in self.gradients)
        return {name: self.gradients[name] for name in names}


def _by_sequence(x_ND: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return rows of tokens, sequence first, as [B, T, D] of their own."""
    return x_ND.detach().unflatten(0, (-1, num_sequences)).transpose(0, 1).clone()


@contextmanager
def hearing(model: Decoder) -> Iterator[HeardActivations]:
    """Hear what passes the boundaries of a model."""
    heard = HeardActivations()
    handles = listen_to_boundaries(model, heard.hear)
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def with_routers(forward: Activations, routed: Mapping[int, RoutedLayer]) -> Activations:
    """Return the activations and, before each mixture of experts, its scores and gates."""
    found: dict[str, torch.Tensor] = {}
    for name, value in forward.items():
        prefix, _, part = name.rpartition(".")
        layer = int(prefix.partition(".")[2]) if prefix else -1
        if part == "mlp" and layer in routed:
            one = routed[layer]
            found[f"{prefix}.scores"] = one.wanted_BTE
            gates_BTE = one.gates_BTK.new_zeros(one.wanted_BTE.shape)
            found[f"{prefix}.gates"] = gates_BTE.scatter(-1, one.picked_BTK, one.gates_BTK)
        found[name] = value
    return found
