# SPDX-License-Identifier: Apache-2.0
"""The loss of a step of the oracle again, in parts: by sequence, by token, and what routers add."""

from __future__ import annotations

import torch

from echelon.core.plan import Plan
from echelon.models.decoder import Decoder
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, build_decoder, token_losses
from echelon.proof.oracle.routing import routing_losses


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
