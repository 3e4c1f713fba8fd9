"""The oracle: the same training on one device, plain enough to be believed by reading it.

One process, the plain decoder, autograd, the whole global batch at once; the loss is the sum over
valid tokens divided by their number; the norm is over everything; AdamW is a formula.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.initial import initial_values
from echelon.models.operations import Operations
from echelon.prove.batches import global_batch
from echelon.prove.formulas import (
    Moments,
    Update,
    adamw,
    clip_scale,
    global_norm,
    learning_rate,
)
from echelon.prove.subject import GlobalBatch

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

    `before` and `after` are the parameters around it, `gradients` those of the mean loss before
    clipping, `updates` what AdamW added, in its two parts.
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
    updates: Mapping[str, Update]
    after: Mapping[str, torch.Tensor]


def run_oracle(plan: Plan, num_steps: int) -> tuple[OracleStep, ...]:
    """Return the steps of `plan` on one device, in the plan's own precision."""
    master = TORCH_DTYPES[plan.mathematics.precision.master]
    values = {name: value.to(master) for name, value in initial_parameters(plan).items()}
    moments = {
        name: Moments(torch.zeros_like(value), torch.zeros_like(value))
        for name, value in values.items()
    }
    steps: list[OracleStep] = []
    for step in range(num_steps):
        steps.append(_step(plan, step, values, moments))
        values = dict(steps[-1].after)
    return tuple(steps)


def initial_parameters(plan: Plan) -> dict[str, torch.Tensor]:
    """Return the first values of all parameters, in forward order."""
    seed = plan.mathematics.seed
    return {spec.name: initial_values(plan.model, spec, seed) for spec in parameters(plan.model)}


def build_decoder(
    plan: Plan, values: Mapping[str, torch.Tensor], operations: Operations | None = None
) -> Decoder:
    """Return the whole model on one device, holding `values`, in the plan's parameter dtype."""
    dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
    model = Decoder(plan.model, operations=operations).to(dtype)
    own = dict(model.named_parameters())
    assert own.keys() == values.keys(), "the decoder and the table of parameters differ"
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])
    return model


def token_losses(plan: Plan, model: Decoder, batch: GlobalBatch, step: int) -> torch.Tensor:
    """Return the loss of each token, [B, T]; 0 where the label is not counted."""
    tokens = TokenBatch.from_rows(
        batch.inputs_BT,
        batch.labels_BT,
        torch.tensor(batch.sample_ids, dtype=torch.int64),
        step=step,
        seed=plan.mathematics.seed,
    )
    x_ND = model.norm(model.hidden(None, tokens))
    return _head_losses(model, x_ND, tokens)


def _head_losses(model: Decoder, x_ND: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    logits_NV = model.operations.logits(x_ND, model.head_weight)
    losses_N = fn.cross_entropy(
        logits_NV, tokens.labels_N, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses_N.view(tokens.sequence_length, tokens.num_sequences).t()


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
    model = build_decoder(plan, oracle.before)
    batch = global_batch(plan, oracle.step)
    sums = sums_by_slot(plan, batch, token_losses(plan, model, batch, oracle.step))
    parts: dict[Slot, dict[str, torch.Tensor]] = {}
    for slot, (total, _) in sums.items():
        model.zero_grad(set_to_none=True)
        (total / oracle.tokens).backward(retain_graph=True)
        parts[slot] = _gradients(model)
    return parts


def _step(
    plan: Plan, step: int, values: Mapping[str, torch.Tensor], moments: dict[str, Moments]
) -> OracleStep:
    optimizer, precision = plan.mathematics.optimizer, plan.mathematics.precision
    model = build_decoder(plan, values)
    batch = global_batch(plan, step)
    losses_BT = token_losses(plan, model, batch, step)
    count = int((batch.labels_BT != IGNORED_LABEL).sum())
    loss = losses_BT.sum() / count
    loss.backward()
    gradients = {
        name: gradient.to(TORCH_DTYPES[precision.gradients])
        for name, gradient in _gradients(model).items()
    }
    norm = global_norm(gradients)
    scale = clip_scale(norm, optimizer.clip_norm)
    updates = {
        name: adamw(
            value, (gradients[name] * scale).to(value.dtype), moments[name], optimizer, step
        )
        for name, value in values.items()
    }
    sums = sums_by_slot(plan, batch, losses_BT.detach())
    return OracleStep(
        step=step,
        loss=float(loss.detach()),
        tokens=count,
        microbatch_losses={slot: (float(total), n) for slot, (total, n) in sums.items()},
        before=dict(values),
        gradients=gradients,
        grad_norm=norm,
        clip_scale=scale,
        learning_rate=learning_rate(optimizer, step),
        updates=updates,
        after={n: value + updates[n].adam + updates[n].decay for n, value in values.items()},
    )


def _gradients(model: Decoder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"the oracle has no gradient of {name}"
        result[name] = parameter.grad.detach().clone()
    return result
