"""What backward begins from: the loss of all tokens, and what routers add beside it."""

from __future__ import annotations

import torch

from echelon.core.plan import Plan
from echelon.models.decoder import Decoder
from echelon.prove.batches import global_batch
from echelon.prove.oracle import OracleStep, build_decoder, token_losses
from echelon.prove.oracle_routing import routing_losses


def loss_of_sequences(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return what each sequence adds to the loss, [B]."""
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    loss_B = losses_BT.sum(1) / oracle.tokens
    beside_B = beside_of_sequences(plan, model, oracle)
    return loss_B if beside_B is None else loss_B + beside_B


def beside_of_sequences(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor | None:
    """Return what the routers of a model that has run add to the loss of each sequence, if so."""
    return routing_losses(plan, model.operations.routing, oracle.routing).gradient_B


def loss_of_tokens(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return the loss without what routers add."""
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    return losses_BT.sum() / oracle.tokens


def whole_loss(plan: Plan, model: Decoder, oracle: OracleStep) -> torch.Tensor:
    """Run a model on the batch of a step; return all that its gradient is the gradient of."""
    return loss_of_sequences(plan, model, oracle).sum()


def gradient_beside(plan: Plan, oracle: OracleStep, name: str) -> torch.Tensor | None:
    """Return the part of a gradient that routers add; None where they add nothing."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    loss_of_sequences(plan, model, oracle)
    beside_B = beside_of_sequences(plan, model, oracle)
    if beside_B is None:
        return None
    parameter = model.get_parameter(name)
    return torch.autograd.grad(beside_B.sum(), parameter, allow_unused=True)[0]
