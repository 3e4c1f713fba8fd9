# SPDX-License-Identifier: Apache-2.0
"""Write with a trained model on one device and without a cache, from a checkpoint of any split.

What the prover reads a run back with (`whole_run.py`), beside the ranks that generate
(`inference.py`), which have a path of their own through the model: each is compared with one
process that was written independently.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from echelon.core.parameters import router_bias_name, router_biases
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.precision import TORCH_DTYPES, at_least_fp32
from echelon.parallel.fp8_linear import multiply_in_fp8
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.data.dataset import document_starts
from echelon.training.steps.expert_balance import ROUTER_BIAS, whole_shards


@torch.no_grad()
def continue_tokens(
    decoder: Decoder,
    tokens: list[int],
    count: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    separator: int | None = None,
) -> list[int]:
    """Return `count` token ids that continue `tokens`, sampled at `temperature`.

    The whole context is run again for each token: right for a few hundred tokens of a small model.
    One that was trained on separate documents does not look beyond the last `separator`. Experts
    are chosen as the decoder's `operations.routing` says.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(tokens)
    for _ in range(count):
        recent = written[-decoder.shape.max_positions :]
        context = torch.tensor(recent)
        whole = TokenBatch.from_rows(
            context[None],
            torch.full_like(context, IGNORED_LABEL)[None],
            torch.zeros(1, dtype=torch.int64),
            train=False,
        )
        joined = separator is None
        documents = None if joined else document_starts(np.array([recent]), separator)
        batch = whole.cut((), documents)
        x_ND = decoder.norm(decoder.hidden(None, batch)[-1:])
        logits_V = decoder.logits(x_ND)[0]
        weights_V = (logits_V / temperature).softmax(-1)
        written.append(int(torch.multinomial(weights_V, 1, generator=generator)))
    return written[len(tokens) :]


def load_decoder(plan: Plan, checkpoint: Path, tokenizer_hash: str) -> Decoder:
    """Return the whole model on one device with the weights of a checkpoint of `plan`.

    They are the master copies, in their dtype. Where linear layers were trained to multiply 8-bit
    numbers, they do.

    Of experts, the biases of their routers too: tokens are routed as they were trained to be. But
    nothing is dropped: the room of an expert is counted by sequence, and a text that has just begun
    would have hardly any.
    """
    decoder = Decoder(plan.model).to(TORCH_DTYPES[plan.mathematics.precision.master])
    if plan.mathematics.precision.is_fp8:
        multiply_in_fp8(decoder, plan.mathematics.precision.fp8_block)
    wide = at_least_fp32(TORCH_DTYPES[plan.mathematics.precision.parameters])
    biases = {spec.name: torch.zeros(spec.shape, dtype=wide) for spec in router_biases(plan.model)}
    with torch.no_grad():
        load_checkpoint(
            checkpoint,
            wanted={
                PARAMETERS: whole_shards(
                    {name: weight.data for name, weight in decoder.named_parameters()}
                ),
                ROUTER_BIAS: whole_shards(biases),
            },
            identity=RunIdentity.from_plan(plan, tokenizer_hash),
            exchange=SingleRankCommunicator(),
        )
    routing = decoder.operations.routing
    routing.balance = replace(plan.mathematics.balance, capacity_factor=None)
    routing.biases = {
        layer: biases[router_bias_name(layer)]
        for layer in range(plan.model.layers)
        if router_bias_name(layer) in biases
    }
    return decoder
