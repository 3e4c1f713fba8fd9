"""A model of transformers, and its training by torch's own optimizers.

Shape suffixes: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as fn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.training.round_trips.draws import Settings
from tests.training.round_trips.layouts import Updates

Tensors = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, each [B, T]."""

PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Caps of scores are computed by plain attention only; kernels of experts want widths of 4."""


def be_quiet() -> None:
    """Have transformers show no bars of progress, and say nothing of tiny configurations."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Say what some steps of training came to."""

    losses: tuple[float, ...]
    """Mean loss of each global batch, before its update."""
    largest_gradient: float
    """The largest element of the gradients of all steps, before clipping."""


def make_model(kind: str, settings: Settings, folder: Path, *, seed: int = 1) -> Any:
    """Save a random model, of which no bias is zero and no norm is one; return it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **settings)
    model: Any = AutoModelForCausalLM.from_config(config, **PLAIN).float().eval()
    biases = [one for name, one in model.named_buffers() if name.endswith("score_correction_bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            # Norms stay above 1/2: where files have 1 less of them, all bits come back then.
            tensor.add_(torch.randn_like(tensor).clamp(-3, 3) * (0.2 if tensor.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    return model


def read_model(folder: Path) -> Any:
    """Return the model of a folder, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **PLAIN).eval()


def their_logits(model: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V]."""
    with torch.no_grad():
        return model(tokens_BT).logits


def train_theirs(model: Any, batches: Sequence[Batch], updates: Updates) -> Trained:
    """Take a step on each global batch, and return the losses."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    named = list(found.values())
    # The biases of experts are a stack [E, F] there, and vectors all the same.
    matrices = [one.dim() > 1 and not name.endswith("bias") for name, one in found.items()]
    decays = [matrix or updates.decay_of == "all" for matrix in matrices]
    groups = [
        {
            "params": [one for one, does in zip(named, decays, strict=True) if does is wanted],
            "weight_decay": updates.decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer
    if updates.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=updates.rate, betas=updates.betas, eps=updates.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=updates.rate, momentum=updates.momentum)
    losses: list[float] = []
    largest = 0.0
    for tokens_BT, labels_BT in batches:
        logits_BTV = model(tokens_BT).logits
        loss = fn.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [one.grad for one in named if one.grad is not None]
        largest = max([largest, *(float(one.abs().max()) for one in gradients)])
        norm = float(torch.stack([one.double().norm() for one in gradients]).norm())
        if updates.clip is not None and norm > updates.clip:
            for one in gradients:
                one.mul_(updates.clip / norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses=tuple(losses), largest_gradient=largest)
