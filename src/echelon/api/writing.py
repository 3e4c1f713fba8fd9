"""Let a trained model write: load its checkpoint on one device, whatever split trained it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from echelon.api.training import TrainResult
from echelon.core.parameters import router_bias_name, router_biases
from echelon.core.plan import Plan
from echelon.models.decoder import Decoder
from echelon.observe.run_directory import open_run
from echelon.train.checkpoint.exchange import OneRank
from echelon.train.checkpoint.folder import find_latest
from echelon.train.checkpoint.identity import RunIdentity
from echelon.train.checkpoint.index import PARAMETERS
from echelon.train.checkpoint.load import load_checkpoint
from echelon.train.data.dataset import TokenDataset
from echelon.train.expert_state import ROUTER_BIAS, whole_shards
from echelon.train.generate import generate


def write_text(
    result: TrainResult, prompt: str, count: int, *, temperature: float = 0.6, seed: int = 0
) -> str:
    """Return `prompt` and what the newest checkpoint of a run writes after it, `count` tokens."""
    tokenizer = TokenDataset.open(result.data).tokenizer()
    plan = open_run(result.run).plan()
    checkpoint = find_latest(result.run).path
    decoder = load_decoder(plan, checkpoint, tokenizer.description.hash)
    start = tokenizer.encode(prompt)
    separate = plan.mathematics.documents == "separate"
    ids = generate(
        decoder,
        start,
        count,
        temperature=temperature,
        seed=seed,
        separator=tokenizer.description.end_of_document if separate else None,
    )
    return prompt + tokenizer.decode(ids)


def load_decoder(plan: Plan, checkpoint: Path, tokenizer_hash: str) -> Decoder:
    """Return the whole model on one device with the weights of a checkpoint of `plan`.

    Of experts, the biases of their routers too: tokens are routed as they were trained to be. But
    nothing is dropped: the room of an expert is counted by sequence, and a text that has just begun
    would have hardly any.
    """
    decoder = Decoder(plan.model)
    biases = {spec.name: torch.zeros(spec.shape) for spec in router_biases(plan.model)}
    with torch.no_grad():
        load_checkpoint(
            checkpoint,
            wanted={
                PARAMETERS: whole_shards(
                    {name: weight.data for name, weight in decoder.named_parameters()}
                ),
                ROUTER_BIAS: whole_shards(biases),
            },
            identity=RunIdentity.of(plan, tokenizer_hash),
            exchange=OneRank(),
        )
    routing = decoder.operations.routing
    routing.balance = replace(plan.mathematics.balance, capacity_factor=None)
    routing.biases = {
        layer: biases[router_bias_name(layer)]
        for layer in range(plan.model.layers)
        if router_bias_name(layer) in biases
    }
    return decoder
