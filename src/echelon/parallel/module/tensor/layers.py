# SPDX-License-Identifier: Apache-2.0
"""Layers of any module on their pieces, and the stream of its blocks along the sequence.

Split: as the rules say; a linear layer by its outputs or its inputs, a vocabulary by its rows, and
       with sequence parallelism the positions between them.
Sent:  sums, gathers and scatters, layer by layer; layers that read one tensor share the sum of its
       gradients.
Bytes: `module_tensor_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: the degree | outputs, inputs and heads of what is cut; positions with sequence
       parallelism.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation
       Recomputation in Large Transformer Models", 2022.

Weights stay parameters of the module, and a module keeps its class: a layer that is cut has a
`forward` of its own, which says where values go. Its `product` is replaced where a weight gradient
is written to its bucket (`forwards/linear.py`, `forwards/linear.py`); autograd makes all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import MODULE_SEQUENCE
from echelon.layout.modules import CUT_INPUTS, CUT_OUTPUTS, SequenceRegion, TensorPiece
from echelon.parallel.module.tensor.experts import SplitExperts
from echelon.parallel.module.tensor.split import LayerSplit, SplitPlan, is_transposed
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import (
    GATHER_ROWS,
    OWN_ROWS,
    SCATTER_ROWS,
    SUM_GRADIENT,
    SUM_ROWS,
    WHOLE_ROWS,
    MoveRows,
    RowsMotion,
)
from echelon.parallel.vocabulary import local_ids

Way = tuple[RowsMotion, RowsMotion]

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Inputs and a bias -> what a layer gives on this rank."""

_POSITIONS = -2  # the dim of the positions of a sequence
_COLUMNS = -1  # the dim that layers are cut along


def move_along(x: torch.Tensor, dim: int, group: Group, name: str, way: Way) -> torch.Tensor:
    """Return a tensor after a motion of rows along one of its dims, and its transpose backward.

    Pieces are sent as they lie in memory, stacked [n, ...]: what is gathered is copied once to be
    contiguous, as all layers after it want it.
    """
    at = dim % x.dim()
    if at == 0:
        y: torch.Tensor = MoveRows.apply(x, group, name, way)
        return y
    if way in (GATHER_ROWS, WHOLE_ROWS):
        y = MoveRows.apply(x.unsqueeze(0), group, name, way)
        return y.movedim(0, at).flatten(at, at + 1)
    y = MoveRows.apply(x.unflatten(at, (group.size, -1)).movedim(at, 0), group, name, way)
    return y.squeeze(0)


class TensorLink:
    """Move rows over the tensor ranks, or keep still where what is computed is thrown away.

    A pipeline stage that is not the first runs what stands before the blocks, and has no use for
    it: then nothing is sent, and values have the right shape only.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sends = self.watches = True
        self.rows: int | None = None
        """The positions, of all sequences, that a rank has between blocks; None: not known."""
        self.heads: list[SplitLinear] = []
        """The heads of which each rank has some columns."""

    def move(self, x: torch.Tensor, dim: int, name: str, way: Way) -> torch.Tensor:
        """Return a tensor after a motion of rows along one of its dims, and back in backward."""
        if self.sends or way is OWN_ROWS:
            return move_along(x, dim, self.group, name, way)
        if way in (GATHER_ROWS, WHOLE_ROWS):
            return torch.cat([x] * self.group.size, dim)
        return x.chunk(self.group.size, dim)[0] if way is SCATTER_ROWS else x

    def check_rows(self, x: torch.Tensor, name: str) -> None:
        """Refuse to gather some of the positions: those of other ranks are others."""
        rows = x.numel() // x.shape[-1]
        if self.rows is not None and rows != self.rows:
            raise RunFailed(
                MODULE_SEQUENCE.problem(
                    f"{name.partition('#')[0]} got {rows} positions, and the stream has "
                    f"{self.rows} on each rank: those that were chosen, as of an expert, are not "
                    "pieces of one tensor",
                    suggestions=(
                        "mesh.sequence_parallel = false",
                        "experts in stacks [E, ...], with the rule 'expert'",
                    ),
                )
            )


class SharedEntry:
    """What column layers do with an input that they share: once for all of them."""

    def __init__(self, link: TensorLink, name: str, uses: int, way: Way, dim: int) -> None:
        """Move what is given along `dim`; forget it when `uses` layers have had it."""
        self._link, self._name, self._uses = link, name, uses
        self._way, self._dim = way, dim
        self._left = 0
        self._held: tuple[torch.Tensor, int, bool, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input as the layers need it."""
        grad = torch.is_grad_enabled()
        held = self._held
        if held is None or held[0] is not x or held[1] != x._version or held[2] is not grad:
            if self._way is GATHER_ROWS:
                self._link.check_rows(x, self._name)
            y = self._link.move(x, self._dim, self._name, self._way)
            held, self._left = (x, x._version, grad, y), self._uses
        self._left -= 1
        self._held = held if self._left > 0 else None
        return held[3]


class SplitLinear:
    """The forward of a linear layer that is cut.

    `product` computes it from what this rank has. Another one may stand there, whose backward
    writes dW where its bucket is, or puts it off.
    """

    def __init__(
        self,
        one: LayerSplit,
        link: TensorLink,
        entry: Callable[[torch.Tensor], torch.Tensor],
        *,
        scatters: bool,
    ) -> None:
        """Compute the layer `one`, whose inputs come through `entry`."""
        self.module, self._kind = one.module, one.layer.kind
        self._name, self._link = one.layer.name, link
        self._entry, self._scatters = entry, scatters
        self.whole_outputs = one.whole_outputs
        self.keeps: Callable[[torch.Tensor], None] | None = None
        """Who learns of the columns of a vocabulary that are not gathered; None: they are."""
        self.transposed = is_transposed(one.module)
        self.product: Product = self._product

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the layer gives, of this rank or whole, as its kind says."""
        module: Any = self.module
        if self._kind not in CUT_INPUTS:
            y = self.product(self._entry(input), module.bias)
            if self._kind == "column":
                return y
            if self.keeps is not None:
                self.keeps(y)
                return y
            return self.gathered(y)
        x = input
        if self._kind == "row-scattered":
            x = self._link.move(x, _COLUMNS, f"{self._name}.input", OWN_ROWS)
        y = self.product(x, None)
        if self._scatters:
            y = self._link.move(y, _POSITIONS, self._name, SCATTER_ROWS)
        else:
            y = self._link.move(y, 0, self._name, SUM_ROWS)
        # Once, after the sum.
        return y if module.bias is None else y + module.bias

    def gathered(self, y: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, without padding."""
        return self._link.move(y, _COLUMNS, self._name, WHOLE_ROWS)[..., : self.whole_outputs]

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        module: Any = self.module
        return F.linear(x, module.weight.t() if self.transposed else module.weight, bias)


class _SplitEmbedding:
    """The forward of an embedding of which each rank has some rows."""

    def __init__(self, one: LayerSplit, link: TensorLink) -> None:
        self._module, self._name, self._link = one.module, one.layer.name, link
        self._own: Callable[..., torch.Tensor] = one.module.forward
        module: Any = one.module
        if module.padding_idx is not None:
            local = module.padding_idx - link.group.index * module.weight.shape[0]
            module.padding_idx = local if 0 <= local < module.weight.shape[0] else None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        local, elsewhere = local_ids(input, module.weight.shape[0], self._link.group)
        y = self._own(local).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self._link.move(y, 0, self._name, SUM_ROWS)


def cut_values(piece: TensorPiece, whole: torch.Tensor, degree: int, index: int) -> torch.Tensor:
    """Return what a rank holds of a whole tensor; padding is zero."""
    local = whole.new_zeros(piece.local_shape(degree))
    start = 0
    for part, (first, last) in zip(piece.parts, piece.ranges(degree, index), strict=True):
        local.narrow(piece.dim, start, last - first).copy_(
            whole.narrow(piece.dim, first, last - first)
        )
        start += -(-part // degree)
    return local


def join_values(piece: TensorPiece, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the whole of what all ranks hold of a tensor, in their order."""
    whole = locals_[0].new_empty(piece.shape)
    for index, local in enumerate(locals_):
        start = 0
        ranges = piece.ranges(len(locals_), index)
        for part, (first, last) in zip(piece.parts, ranges, strict=True):
            whole.narrow(piece.dim, first, last - first).copy_(
                local.narrow(piece.dim, start, last - first)
            )
            start += -(-part // len(locals_))
    return whole


@torch.no_grad()
def cut_parameters(plan: SplitPlan, named: Mapping[str, nn.Parameter], group: Group) -> None:
    """Leave of each parameter that is cut what this rank holds; it stays the same parameter."""
    for piece in plan.split.pieces:
        parameter = named[piece.name]
        parameter.data = cut_values(piece, parameter.data, group.size, group.index)
    for division in plan.named.divisions:
        division.divide(group.size)


def replace_layers(model: nn.Module, plan: SplitPlan, group: Group) -> TensorLink:
    """Give the layers that are cut their forward, and the blocks their part of the sequence."""
    link = TensorLink(group)
    region = plan.split.sequence
    entries: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for one in plan.layers:
        layer, module = one.layer, one.module
        cut = region is not None and region.holds(layer.name)
        if layer.layer == "embedding":
            module.forward = _SplitEmbedding(one, link)
            continue
        if layer.kind in (*CUT_OUTPUTS, "vocabulary") and layer.entry not in entries:
            entries[layer.entry] = _entry(one, plan, link, cut=cut)
        entry = entries.get(layer.entry, _as_it_is)
        module.forward = SplitLinear(one, link, entry, scatters=cut)
        if layer.kind == "vocabulary":
            link.heads.append(module.forward)
        _set_sizes(one, group.size)
    for experts in plan.split.experts:
        module = plan.experts[experts.name]
        module.forward = SplitExperts(module, experts, group)
    if region is not None:
        _cut_stream(model, plan, region, link)
    return link


def _entry(
    one: LayerSplit, plan: SplitPlan, link: TensorLink, *, cut: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    parent, _, number = one.layer.entry.rpartition("#")
    if cut and number == "0" and parent in plan.regions:
        return _as_it_is  # gathered where the module begins
    way, dim = (GATHER_ROWS, _POSITIONS) if cut else (SUM_GRADIENT, 0)
    return SharedEntry(link, one.layer.entry, one.columns_in_entry, way, dim)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _set_sizes(one: LayerSplit, degree: int) -> None:
    """Have a layer say what it holds."""
    module: Any = one.module
    layer = one.layer
    if is_transposed(module):
        module.nf, module.nx = module.weight.shape[1], module.weight.shape[0]
    elif layer.kind in CUT_INPUTS:
        module.in_features = layer.inputs // degree
    else:
        module.out_features = layer.outputs // degree


def _cut_stream(
    model: nn.Module, plan: SplitPlan, region: SequenceRegion, link: TensorLink
) -> None:
    first, last = region.blocks[0], region.blocks[-1]
    begins: dict[str, tuple[str, Way, int]] = {first: (f"{first}.sequence", OWN_ROWS, region.width)}
    entries = {one.layer.entry: one.layer for one in plan.layers}
    for name in sorted(plan.regions):
        begins[name] = (f"{name}#0", GATHER_ROWS, entries[f"{name}#0"].inputs)
    for module, (name, way, width) in begins.items():
        stream = _Stream(link=link, name=name, way=way, width=width)
        model.get_submodule(module).register_forward_pre_hook(
            partial(_move_input, stream), with_kwargs=True
        )
    ends = _Stream(link=link, name=f"{last}.sequence", way=WHOLE_ROWS, width=region.width)
    model.get_submodule(last).register_forward_hook(partial(_move_output, ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """Say how the stream moves where a module begins or ends."""

    link: TensorLink
    name: str
    way: Way
    width: int


def _move_input(stream: _Stream, module: nn.Module, args: Any, kwargs: Any) -> Any:
    group, name, way = stream.link.group, stream.name, stream.way
    leaves, spec = tree_flatten((args, kwargs))
    place = _stream_of(leaves, stream)
    x = leaves[place]
    if way is OWN_ROWS and x.shape[_POSITIONS] % group.size:
        raise RunFailed(
            MODULE_SEQUENCE.problem(
                f"{x.shape[_POSITIONS]} positions came to {name.removesuffix('.sequence')}, which "
                f"mesh.tp = {group.size} does not divide",
                suggestions=(f"{x.shape[_POSITIONS] // group.size * group.size} positions",),
            )
        )
    if way is GATHER_ROWS:
        stream.link.check_rows(x, name)
    moved = stream.link.move(x, _POSITIONS, name, way)
    if way is OWN_ROWS:
        stream.link.rows = moved.numel() // moved.shape[-1]
    leaves[place] = moved
    return tree_unflatten(leaves, spec)


def _move_output(stream: _Stream, module: nn.Module, args: Any, output: Any) -> Any:
    leaves, spec = tree_flatten(output)
    place = _stream_of(leaves, stream)
    x = leaves[place]
    leaves[place] = stream.link.move(x, _POSITIONS, stream.name, stream.way)
    return tree_unflatten(leaves, spec)


def _stream_of(leaves: Sequence[Any], stream: _Stream) -> int:
    name, width = stream.name, stream.width
    for place, leaf in enumerate(leaves):
        wide = torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.dim() > 1
        if wide and leaf.shape[-1] == width:
            return place
    raise RunFailed(
        MODULE_SEQUENCE.problem(
            f"{name.removesuffix('.sequence')} has no tensor of width {width}: the stream that is "
            "cut along the sequence is not found",
            suggestions=("mesh.sequence_parallel = false",),
        )
    )
