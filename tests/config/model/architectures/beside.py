"""Small models of transformers beside ours: logits, loss and every gradient, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.config.model.hugging_face import read_hf_config
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.interop.hugging_face.folder import hub_config, shape_of_config
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.proof.independent.hugging_face.beside import (
    TokensAndLabels,
    build,
    give_weights,
    loss_and_gradients,
)
from echelon.proof.independent.hugging_face.configuration import TransformersModel
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.config.model.architectures.families import CONFIGURATIONS
from tests.training.weights.rectangles import require_rectangles

T, B = 11, 2
Tensors = dict[str, torch.Tensor]
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def configuration(name: str) -> Any:
    """Return the configuration of transformers."""
    kind, settings = CONFIGURATIONS[name]
    return AutoConfig.for_model(kind, **{**settings, **_NO_TOKENS})


def shape_of(name: str, folder: Path) -> ModelShape:
    """Return the shape that the config.json means which transformers writes."""
    configuration(name).save_pretrained(folder)
    entries, problems = read_hf_config(folder, "test")
    assert not problems, problems
    keys = configuration(name).to_dict()
    found = shape_of_config(keys, name)
    assert found is not None, entries
    return found


def weights_of(shape: ModelShape, seed: int = 3) -> Tensors:
    """Return random weights in float64: those of norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.3
        + spec.name.endswith("norm.weight")
        for spec in parameters(shape)
    }


def rows_of(shape: ModelShape) -> TokensAndLabels:
    """Return random tokens; each is the label of the one before."""
    generator = torch.Generator().manual_seed(8)
    tokens_BT = torch.randint(0, shape.vocab, (B, T), generator=generator)
    return TokensAndLabels(inputs_BT=tokens_BT, labels_BT=tokens_BT.roll(-1, dims=1))


def ours(shape: ModelShape, weights: Tensors, rows: TokensAndLabels) -> tuple[Any, Tensors]:
    """Return the logits [B, T, V], and the gradient of the mean loss in every weight."""
    decoder = Decoder(shape).double()
    decoder.load_state_dict(weights)
    batch = TokenBatch.from_rows(rows.inputs_BT, rows.labels_BT, torch.arange(B))
    decoder(None, batch, scale=1 / (B * T)).backward()
    with torch.no_grad():
        logits_NV = decoder.logits(decoder.norm(decoder.hidden(None, batch)))
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return logits_NV.view(T, B, -1).transpose(0, 1), gradients


def require_the_same_numbers(name: str, folder: Path) -> None:
    """Require the logits, the loss and every gradient of transformers."""
    shape = shape_of(name, folder)
    settings = configuration(name).to_diff_dict()
    text = type(configuration(name)).__name__.removesuffix("Config")
    family = text.removesuffix("Text")
    named = TransformersModel(
        family=family,
        text_family=text if text != family else "",
        settings={**settings, **_NO_TOKENS},
    )
    model = build(named)
    weights, rows = weights_of(shape), rows_of(shape)
    give_weights(model, shape, weights, {})
    theirs = loss_and_gradients(model, shape, rows)
    logits_BTV, gradients = ours(shape, weights, rows)
    scaled = theirs.parts["head", "head"] * shape.multipliers.logits
    torch.testing.assert_close(logits_BTV, scaled, rtol=1e-10, atol=1e-10)
    assert logits_BTV.std() > 0.01
    assert gradients.keys() == theirs.gradients.keys() == {s.name for s in parameters(shape)}
    for key, right in theirs.gradients.items():
        scale = float(right.abs().max())
        error = float((gradients[key] - right).abs().max())
        assert error <= 1e-10 * max(scale, 1e-3), (key, error, scale)


def require_its_files(name: str, folder: Path) -> None:
    """Require the logits of what `save_pretrained` writes, and that the shape says itself."""
    shape = shape_of(name, folder)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(configuration(name), attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.eval().save_pretrained(folder)
    whole = {spec.name: torch.full(spec.shape, float("nan")) for spec in parameters(shape)}
    wanted = {
        key: [Shard(name=key, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
        for key, t in whole.items()
    }
    load_weights(find_weights(folder, shape), wanted, SingleRankCommunicator())
    require_rectangles(folder, shape, whole, Random(3), count=2)
    rows = rows_of(shape)
    logits_BTV, _ = ours(shape, {key: t.double() for key, t in whole.items()}, rows)
    with torch.no_grad():
        theirs = model(rows.inputs_BT).logits
    torch.testing.assert_close(logits_BTV.float(), theirs, rtol=1e-4, atol=1e-4)
    back = hub_config(shape, CONFIGURATIONS[name][0])
    again = shape_of_config(back.keys, shape.name)
    assert again is not None
    assert replace(again, dropout=shape.dropout) == shape


def names_of(*kinds: str) -> list[str]:
    """Return the configurations of some model_types."""
    return [name for name, (kind, _) in CONFIGURATIONS.items() if kind in kinds]
