# SPDX-License-Identifier: Apache-2.0
"""What is in the way of a split: sizes, heads, shared parameters, buffers, random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.core.errors import Problem
from echelon.core.rulebook.module import MODULE_TENSOR_SPLIT
from echelon.layout.modules.tensor import SplitLayer, TensorPiece
from echelon.parallel.module.tensor.rules import NamedTargets

_HEAD_SIZES = ("head_dim", "head_size")
_DROPOUT = ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "resid_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """Hold a layer that is cut: the module, and what is known of it."""

    module: nn.Module
    layer: SplitLayer
    names: Mapping[str, str]
    """The whole names of its own parameters, by their names in it."""
    columns_in_entry: int = 1
    """The layers that share its input."""
    whole_outputs: int = 0
    """The outputs without padding."""


def refused(name: str, why: str, *suggestions: str) -> Problem:
    """Return why a layer cannot be cut, and what would do."""
    instead = suggestions or (f"no rule for {name}: it stays whole on every rank",)
    return MODULE_TENSOR_SPLIT.problem(f"{name}: {why}", key="tensor", suggestions=instead)


def obstacles(
    model: nn.Module,
    named: NamedTargets,
    layers: Sequence[LayerSplit],
    pieces: Mapping[str, TensorPiece],
    degree: int,
) -> Iterator[Problem]:
    """Yield all that is in the way of a split of which layers and pieces are known."""
    yield from _indivisible(model, named, layers, degree)
    yield from _shared(model, pieces)
    yield from _buffers(model, layers)
    yield from _dropout(model)


def _indivisible(
    model: nn.Module, named: NamedTargets, layers: Sequence[LayerSplit], degree: int
) -> Iterator[Problem]:
    """Yield numbers that are not multiples of the degree, and layers that would cut a head."""
    for one in named.divisions:
        if one.value % degree:
            yield refused(
                one.name,
                f"mesh.tp = {degree} does not divide {one.value} ({one.value} % {degree} != 0)",
                f"a degree that divides {one.value}",
            )
    for one in (one.layer for one in layers if one.layer.kind == "column"):
        parent = model.get_submodule(one.name.rpartition(".")[0])
        heads = _heads(parent)
        for what, count in heads.items():
            if count % degree:
                yield refused(
                    one.name,
                    f"mesh.tp = {degree} does not divide {what} = {count}",
                    f"a degree that divides {count}",
                )
        size = next((getattr(parent, name) for name in _HEAD_SIZES if hasattr(parent, name)), None)
        local = one.outputs // degree
        if not heads and isinstance(size, int) and size > 0 and local % size:
            yield refused(
                one.name,
                f"{local} outputs a rank cut a head of {size}",
                f"a degree that divides {one.outputs // size}",
            )


def _heads(parent: nn.Module) -> dict[str, int]:
    """Return the heads that an attention of transformers has by its configuration."""
    config = getattr(parent, "config", None)
    if config is None or not any(hasattr(parent, name) for name in _HEAD_SIZES):
        return {}
    names = ("num_attention_heads", "num_key_value_heads")
    return {name: n for name in names if isinstance(n := getattr(config, name, None), int)}


def _shared(model: nn.Module, pieces: Mapping[str, TensorPiece]) -> Iterator[Problem]:
    """Yield parameters that one module cuts, and another that shares them does otherwise."""
    owners: dict[int, dict[tuple[int, str], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(path, recurse=False):
            place = (id(module), key.rpartition(".")[2])
            # A module in several places has several names, and rules name it by the first.
            owners.setdefault(id(parameter), {}).setdefault(place, key)
    for names in (list(one.values()) for one in owners.values()):
        cuts = {_said(pieces.get(name)) for name in names}
        if len(names) > 1 and len(cuts) > 1:
            ways = ", ".join(f"{name} {_said(pieces.get(name))}" for name in names)
            modules = [name.rpartition(".")[0] for name in names]
            yield refused(
                names[0],
                f"one parameter is held in several ways: {ways}",
                f"the same rule for {' and '.join(modules)}",
            )


def _said(piece: TensorPiece | None) -> str:
    return "whole" if piece is None else f"cut along dim {piece.dim} in {list(piece.parts)}"


def _buffers(model: nn.Module, layers: Sequence[LayerSplit]) -> Iterator[Problem]:
    """Yield buffers beside a layer that is cut which have as many elements along some dim."""
    for one in layers:
        parent, _, _ = one.layer.name.rpartition(".")
        cut = one.layer.outputs if one.layer.kind == "column" else one.layer.inputs
        if one.layer.kind not in ("column", "row"):
            continue
        for path in (parent, one.layer.name):
            owner = model.get_submodule(path)
            for name, buffer in owner.named_buffers(recurse=False):
                if cut in buffer.shape:
                    where = f"{path}.{name}".removeprefix(".")
                    yield refused(
                        one.layer.name, f"buffer {where} has a dim of {cut}, which would be cut"
                    )


def _dropout(model: nn.Module) -> Iterator[Problem]:
    """Yield modules that draw random numbers in training."""
    for name, module in model.named_modules():
        told: dict[str, object] = {key: getattr(module, key, None) for key in _DROPOUT}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            told = {"p": module.p}
        for key, value in told.items():
            if isinstance(value, float) and value > 0:
                yield refused(
                    name or type(module).__name__,
                    f"{key} = {value:g} draws random numbers, which would depend on the split",
                    f"{key} = 0",
                )
