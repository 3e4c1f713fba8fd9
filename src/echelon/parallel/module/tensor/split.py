# SPDX-License-Identifier: Apache-2.0
"""From rules to what each tensor rank holds: every reason why a module cannot be cut.

In the way are sizes, heads, shared parameters, buffers, and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import MODULE_SEQUENCE, MODULE_TENSOR_SPLIT
from echelon.layout.modules import (
    CUT_INPUTS,
    CUT_OUTPUTS,
    ModuleSplit,
    SequenceRegion,
    SplitLayer,
    StackedExperts,
    TensorPiece,
)
from echelon.parallel.module.tensor.rules import NamedTargets, Target

_HEAD_SIZES = ("head_dim", "head_size")
_DROPOUT = ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "resid_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Hold how a module is cut, and the layers to be replaced."""

    split: ModuleSplit
    layers: Sequence[LayerSplit]
    named: NamedTargets
    regions: frozenset[str]
    """Modules in which the stream is whole again, where blocks have parts of the sequence."""
    experts: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    """Modules with stacks of experts, by name."""


def plan_split(
    model: nn.Module,
    named: NamedTargets,
    *,
    degree: int,
    blocks: Sequence[str] | None = None,
) -> SplitPlan:
    """Return how `degree` tensor ranks hold a module; ConfigError with all that is in the way.

    With `blocks`, in the order in which they run, the stream in them is cut along the sequence.
    """
    problems: list[Problem] = []
    pieces: dict[str, TensorPiece] = {}
    layers: list[LayerSplit] = []
    entries = _entries(model, named.targets)
    for target in named.targets:
        if target.rule.kind in ("replicated", "summed"):
            continue
        try:
            if target.rule.kind == "expert":
                pieces |= {piece.name: piece for piece in _cut_experts(target, named, degree)}
                continue
            layer, held = _cut(target, entries, degree)
        except ValueError as error:
            problems.append(refused(target.name, str(error)))
            continue
        pieces |= {piece.name: piece for piece in held}
        layers += [layer] if layer is not None else []
    problems += [
        *obstacles(model, named, layers, pieces, degree),
    ]
    region = _sequence_region(model, layers, blocks, problems)
    if problems:
        raise ConfigError(problems)
    regions = _regions(layers, region)
    experts = {
        one.name: one.module
        for one in named.targets
        if one.rule.kind == "expert" and one.module is not None
    }
    _refuse_gathered(experts, regions)
    split = ModuleSplit(
        degree=degree,
        pieces=tuple(_canonical(model, pieces)),
        layers=tuple(one.layer for one in layers),
        summed=frozenset(_summed(model, named.targets, pieces, region, regions)),
        sequence=region,
        experts=tuple(
            StackedExperts(
                name=name,
                num_experts=next(module.parameters(recurse=False)).shape[0],
                cut=region is not None and region.holds(name),
            )
            for name, module in experts.items()
        ),
    )
    counted = _counted(layers)
    return SplitPlan(split=split, layers=counted, named=named, regions=regions, experts=experts)


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a linear layer, or what GPT-2 has for one."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or is_transposed(module)


def is_transposed(module: nn.Module | None) -> bool:
    """Return whether a module is the Conv1D of transformers: its weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _cut(
    target: Target, entries: Mapping[str, str], degree: int
) -> tuple[LayerSplit | None, list[TensorPiece]]:
    """Return the layer and the pieces of its parameters; ValueError says why there are none."""
    kind, module = target.rule.kind, target.module
    if kind == "divide":
        raise ValueError("a number is divided, a layer is not")
    if module is None:
        assert target.parameter is not None, "a target is a module or a parameter"
        if kind != "column":
            raise ValueError(
                f'a parameter by itself is "column", "replicated" or "summed", not {kind}'
            )
        shape = tuple(target.parameter.shape)
        if not shape:
            raise ValueError("a single number has no dim that could be cut")
        parts = _parts(target, shape[0], degree)
        return None, [TensorPiece(name=target.name, shape=shape, dim=0, parts=parts)]
    if isinstance(module, nn.Embedding):
        return _cut_embedding(target, module, degree)
    if not is_linear(module):
        raise ValueError(f"{type(module).__name__} is neither Linear nor Embedding")
    weight = module._parameters.get("weight")
    if weight is None:
        raise ValueError("its weight is computed from others (a parametrization)")
    transposed = is_transposed(module)
    outputs, inputs = (weight.shape[1], weight.shape[0]) if transposed else weight.shape
    cuts_outputs = kind in (*CUT_OUTPUTS, "vocabulary")
    parts = _parts(target, outputs if cuts_outputs else inputs, degree, pads=kind == "vocabulary")
    dim = int(cuts_outputs == transposed)
    name = f"{target.name}.weight"
    pieces = [TensorPiece(name=name, shape=tuple(weight.shape), dim=dim, parts=parts)]
    bias = module._parameters.get("bias")
    if bias is not None and cuts_outputs:
        shape = tuple(bias.shape)
        pieces.append(TensorPiece(name=f"{target.name}.bias", shape=shape, dim=0, parts=parts))
    padded = sum(-(-part // degree) for part in parts) * degree
    layer = SplitLayer(
        name=target.name,
        kind=kind,
        layer="linear",
        inputs=inputs if cuts_outputs else padded,
        outputs=padded if cuts_outputs else outputs,
        entry=entries.get(target.name, target.name),
    )
    return _layer_split(module, layer, outputs), pieces


def _cut_embedding(
    target: Target, module: nn.Embedding, degree: int
) -> tuple[LayerSplit, list[TensorPiece]]:
    if target.rule.kind != "vocabulary":
        raise ValueError(f'an embedding is cut by "vocabulary", not by {target.rule.kind!r}')
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ValueError("max_norm, sparse and scale_grad_by_freq need all rows on one rank")
    rows, width = module.weight.shape
    piece = TensorPiece(
        name=f"{target.name}.weight",
        shape=(rows, width),
        dim=0,
        parts=_parts(target, rows, degree, pads=True),
    )
    layer = SplitLayer(
        name=target.name,
        kind="vocabulary",
        layer="embedding",
        inputs=-(-rows // degree) * degree,
        outputs=width,
        entry=target.name,
    )
    return _layer_split(module, layer, width), [piece]


def _cut_experts(target: Target, named: NamedTargets, degree: int) -> list[TensorPiece]:
    """Return the pieces of stacks of experts; ValueError says why there are none."""
    module = target.module
    inside = f"{target.name}."
    own = {} if module is None else {n: p for n, p in module._parameters.items() if p is not None}
    if module is None or not own:
        raise ValueError(
            '"expert" names the module whose parameters are stacks of experts [E, ...]; experts '
            'that are modules of their own are cut one by one, "column" and "row"'
        )
    if deeper := [name for name, _ in module.named_parameters() if name not in own]:
        raise ValueError(f"{inside}{deeper[0]} is no stack of experts beside the others")
    sizes = {name: one.shape[0] if one.dim() > 1 else 0 for name, one in own.items()}
    if len({*sizes.values(), 0}) != 2 or 0 in sizes.values():
        told = ", ".join(f"{name} {list(one.shape)}" for name, one in own.items())
        raise ValueError(f"its parameters are not stacks of as many experts: {told}")
    if other := [one.name for one in named.targets if one.name.startswith(inside)]:
        raise ValueError(f"{other[0]} has a rule, too, and is whole on the rank of its expert")
    parts = _parts(target, next(iter(sizes.values())), degree)
    if target.rule.parts is not None:
        raise ValueError("experts have no parts")
    return [
        TensorPiece(name=f"{inside}{name}", shape=tuple(one.shape), dim=0, parts=parts)
        for name, one in own.items()
    ]


def _refuse_gathered(experts: Iterable[str], regions: Iterable[str]) -> None:
    """ConfigError for experts in a module whose own columns have the stream gathered for them."""
    inside = tuple(f"{name}." for name in regions)
    problems = [
        refused(
            name,
            f"columns beside it have the stream of {name.rpartition('.')[0]} gathered, and experts "
            "take the positions of a rank",
            "a module of their own for these columns",
            "mesh.sequence_parallel = false",
        )
        for name in experts
        if inside and name.startswith(inside)
    ]
    if problems:
        raise ConfigError(problems)


def _layer_split(module: nn.Module, layer: SplitLayer, outputs: int) -> LayerSplit:
    names = {
        name: f"{layer.name}.{name}" for name, one in module._parameters.items() if one is not None
    }
    return LayerSplit(module=module, layer=layer, names=names, whole_outputs=outputs)


def _parts(target: Target, size: int, degree: int, *, pads: bool = False) -> tuple[int, ...]:
    given = target.rule.parts
    if given is None:
        parts: tuple[int, ...] = (size,)
    elif isinstance(given, int):
        if given < 1 or size % given:
            raise ValueError(f"{size} is not {given} equal parts")
        parts = (size // given,) * given
    else:
        parts = tuple(given)
        if sum(parts) != size:
            raise ValueError(f"parts {list(parts)} add up to {sum(parts)}, and there are {size}")
    if pads and len(parts) == 1:
        return parts
    for part in parts:
        if part % degree:
            raise ValueError(f"mesh.tp = {degree} does not divide {part} ({part} % {degree} != 0)")
    return parts


def _entries(model: nn.Module, targets: Sequence[Target]) -> dict[str, str]:
    """Return which column layers read one input: those of one parent up to its next row layer."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    found: dict[str, str] = {}
    last: dict[str, int] = {}
    for target in sorted(targets, key=lambda one: order.get(one.name, -1)):
        parent = target.name.rpartition(".")[0]
        if target.rule.kind in CUT_INPUTS and parent in last:
            last[parent] += 1
        elif target.rule.kind in CUT_OUTPUTS:
            number = last.setdefault(parent, 0)
            found[target.name] = f"{parent}#{number}"
    return found


def _counted(layers: Sequence[LayerSplit]) -> list[LayerSplit]:
    entries = [one.layer.entry for one in layers]
    return [
        LayerSplit(
            module=one.module,
            layer=one.layer,
            names=one.names,
            columns_in_entry=entries.count(one.layer.entry),
            whole_outputs=one.whole_outputs,
        )
        for one in layers
    ]


def _sequence_region(
    model: nn.Module,
    layers: Sequence[LayerSplit],
    blocks: Sequence[str] | None,
    problems: list[Problem],
) -> SequenceRegion | None:
    if blocks is None:
        return None
    entries = [
        one.layer
        for one in layers
        if one.layer.kind in CUT_OUTPUTS
        and SequenceRegion(blocks=tuple(blocks), width=0).holds(one.layer.name)
    ]
    if blocks and entries:
        return SequenceRegion(blocks=tuple(blocks), width=entries[0].inputs)
    what = "no layer in its blocks is cut by columns" if blocks else "the module has no blocks"
    problems.append(
        MODULE_SEQUENCE.problem(
            f"mesh.sequence_parallel = true, and {what}",
            key="mesh.sequence_parallel",
            suggestions=("mesh.sequence_parallel = false", "units=['NAME', ...]"),
        )
    )
    return None


def _regions(layers: Sequence[LayerSplit], region: SequenceRegion | None) -> frozenset[str]:
    """Return the modules of column layers, inside of blocks: in them the stream is whole."""
    if region is None:
        return frozenset()
    parents = {
        one.layer.name.rpartition(".")[0]
        for one in layers
        if one.layer.kind in CUT_OUTPUTS and region.holds(one.layer.name)
    }
    return frozenset(parents - set(region.blocks))


def _summed(
    model: nn.Module,
    targets: Sequence[Target],
    pieces: Mapping[str, TensorPiece],
    region: SequenceRegion | None,
    regions: Iterable[str],
) -> Iterator[str]:
    """Yield the parameters that are whole, and work on values of which ranks have parts."""
    said = {target.name: target.rule.kind for target in targets}
    inside = tuple(f"{name}." for name in regions)
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        kinds = [kind for one, kind in said.items() if name == one or name.startswith(f"{one}.")]
        if name in pieces:
            continue
        if "summed" in kinds:
            yield name
        elif region is not None and region.holds(owner) and "replicated" not in kinds:
            yield from [name] * (said.get(owner) in CUT_INPUTS or not name.startswith(inside))


def _canonical(model: nn.Module, pieces: Mapping[str, TensorPiece]) -> Iterator[TensorPiece]:
    """Yield the pieces under the first name of each parameter."""
    for name, _ in model.named_parameters():
        if name in pieces:
            yield pieces[name]
        else:
            parameter = model.get_parameter(name)
            for other, same in model.named_parameters(remove_duplicate=False):
                if same is parameter and other in pieces:
                    piece = pieces[other]
                    yield TensorPiece(
                        name=name, shape=piece.shape, dim=piece.dim, parts=piece.parts
                    )
                    break


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
