"""Let a trained model write: load its checkpoint on one device, whatever split trained it."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.api.training import TrainResult
from echelon.core.plan import Plan
from echelon.models.decoder import Decoder
from echelon.observe.run_directory import open_run
from echelon.parallel.shards import Shard
from echelon.train.checkpoint.exchange import OneRank
from echelon.train.checkpoint.folder import find_latest
from echelon.train.checkpoint.identity import RunIdentity
from echelon.train.checkpoint.index import PARAMETERS
from echelon.train.checkpoint.load import load_checkpoint
from echelon.train.data.dataset import TokenDataset
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
    """Return the whole model on one device with the weights of a checkpoint of `plan`."""
    decoder = Decoder(plan.model)
    weights = {
        name: [
            Shard(
                name=name,
                global_shape=tuple(weight.shape),
                offset=(0,) * weight.dim(),
                tensor=weight.data,
                primary=True,
            )
        ]
        for name, weight in decoder.named_parameters()
    }
    with torch.no_grad():
        load_checkpoint(
            checkpoint,
            wanted={PARAMETERS: weights},
            identity=RunIdentity.of(plan, tokenizer_hash),
            exchange=OneRank(),
        )
    return decoder
