"""Whole mixtures of experts as transformers saves them: shape, weights, logits and loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as fn

from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters, router_biases
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.parallel.layouts import plan_of
from tests.training.weights.transformers_models import SHAPES as SMALL
from tests.training.weights.transformers_models import Original, Tensors, original

T, B = 11, 2
SHAPES = {name: replace(one, vocab=261) for name, one in SMALL.items()}
"""Vocabularies that hold the ids of bytes, as a whole configuration must."""


def saved_shape(folder: Path) -> ModelShape:
    """Return the shape that the config.json of a folder describes."""
    sets = [f"model.hf_config={folder}", f"batch.sequence_length={T}"]
    return load_job("nano", sets).plan.model


def saved_weights(folder: Path, shape: ModelShape) -> tuple[Tensors, dict[int, torch.Tensor]]:
    """Return the parameters of a folder by name, and the biases of routers by layer."""
    biases = router_biases(shape)
    whole = {spec.name: torch.zeros(spec.shape) for spec in (*parameters(shape), *biases)}
    wanted = {
        name: [Shard(name=name, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
        for name, t in whole.items()
    }
    load_weights(find_weights(folder, shape), wanted, SingleRankCommunicator())
    return whole, {spec.layer: whole.pop(spec.name) for spec in biases if spec.layer is not None}


def tokens_of(model: Original) -> tuple[torch.Tensor, TokenBatch]:
    """Return random tokens, one sequence per row, and what the decoder reads of them."""
    generator = torch.Generator().manual_seed(8)
    tokens_BT = torch.randint(0, model.model.config.vocab_size, (B, T), generator=generator)
    labels_BT = tokens_BT.roll(-1, dims=1)
    return tokens_BT, TokenBatch.from_rows(tokens_BT, labels_BT, torch.arange(B))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = original(SHAPES[name])
    shape = saved_shape(model.save(tmp_path, fused=False))
    assert shape.experts == SHAPES[name].experts
    assert shape.latent == SHAPES[name].latent
    decoder = Decoder(shape)
    whole, decoder.operations.routing.biases = saved_weights(tmp_path, shape)
    decoder.load_state_dict(whole)
    tokens_BT, batch = tokens_of(model)
    with torch.no_grad():
        x_ND = decoder.norm(decoder.hidden(None, batch))
        ours = decoder.operations.logits(x_ND, decoder.head_weight).view(T, B, -1)
        theirs = model.model(tokens_BT).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours.transpose(0, 1), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_has_their_loss(name: str, tmp_path: Path) -> None:
    model = original(SHAPES[name])
    shape = saved_shape(model.save(tmp_path, fused=False))
    whole, biases = saved_weights(tmp_path, shape)
    plan = plan_of(model=shape, dtype="fp32", sequence_length=T, microbatch_sequences=B)
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    rank = apply_plan(plan, groups, torch.device("cpu"))
    assert rank.balancer is not None
    with torch.no_grad():
        for bucket in rank.buckets:
            for slot in bucket.slots:
                slot.parameter[: slot.spec.shape[0]].copy_(whole[slot.spec.name])
        for layer, bias in biases.items():
            rank.balancer.biases[layer].copy_(bias)
        tokens_BT, batch = tokens_of(model)
        loss = rank.stages[0](None, batch, scale=1 / (B * T))
        logits_BTV = model.model(tokens_BT).logits
    expected = fn.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.roll(-1, dims=1).flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
