# SPDX-License-Identifier: Apache-2.0
"""What the parameters of a program are on one device: the user's table, or the same name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_NAMES
from echelon.core.rules import did_you_mean
from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import Fused, Logical, Names
from echelon.proof.verify.placement.located import LocatedTensor, equal_slice, fused, located

_LAYER = "{layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Find what a parameter of this rank is on one device."""

    logical: LogicalParameters
    mesh: NamedMesh
    rank: int
    names: Names = field(default_factory=dict[str, "str | Logical | Fused"])

    def logical_name(self, name: str, offset: int = 0) -> str | Logical | Fused:
        """Return what the table says of `name`; the name itself where it says nothing.

        `offset` is added to the number of the layer: {layer} of the table, else the first number.
        """
        for pattern, target in self.names.items():
            match = re.fullmatch(re.escape(pattern).replace(re.escape(_LAYER), r"(\d+)"), name)
            if match:
                layer = str(int(match[1]) + offset) if match.groups() else ""
                return _with_layer(target, layer)
        return _with_offset(name, offset)

    def logical_module(self, name: str, module: nn.Module, offset: int = 0) -> str:
        """Return the name that a module has on one device, by the names of its own parameters."""
        for parameter, _ in module.named_parameters(recurse=False):
            target = self.logical_name(f"{name}.{parameter}", offset)
            if not isinstance(target, Fused):
                return (target if isinstance(target, str) else target.name).rpartition(".")[0]
        return _with_offset(name, offset)

    def locate(self, name: str, shape: Sequence[int], offset: int = 0) -> LocatedTensor:
        """Return where a tensor of this rank lies, by the table; it must have the shape it says."""
        target = self.logical_name(name, offset)
        if isinstance(target, Fused):
            parts = [self._part(name, part) for part in target.parts]
            found = fused(parts, target.dim, target.groups)
        else:
            found = located(*self._part(name, target))
        elements = torch.Size(shape).numel()
        if found.numel != elements:
            whole = ", ".join(f"{one} {list(self.logical.shapes[one])}" for one in found.names)
            raise ConfigError(
                VERIFY_NAMES.problem(
                    f"{name} has shape {list(shape)} on rank {self.rank}, {elements} elements, but "
                    f"its part of {whole} has {found.numel}",
                    key="OnRank.names",
                    suggestions=_shape_hints(shape, self.logical.shapes[found.names[0]], self.mesh),
                )
            )
        return found

    def resolve(self, name: str, program_name: str) -> str:
        """Return the canonical name of one device's; ConfigError for one that is not there."""
        canonical = self.logical.canonical(name)
        if canonical is None:
            of = "" if name == program_name else f" (of {program_name})"
            raise ConfigError(
                VERIFY_NAMES.problem(
                    f"rank {self.rank} has a parameter {name}{of} that one device does not have",
                    key="OnRank.names",
                    suggestions=did_you_mean(name, self.logical.shapes),
                )
            )
        return canonical

    def _part(self, name: str, target: str | Logical) -> tuple[str, torch.Tensor]:
        if isinstance(target, str):
            target = Logical(name=target)
        canonical = self.resolve(target.name, name)
        elements = self.logical.elements(canonical)
        if target.part is not None:
            start, end = target.part
            elements = elements.narrow(target.dim, start, end - start)
        if target.axis is not None:
            axes = (target.axis,) if isinstance(target.axis, str) else target.axis
            unknown = [axis for axis in axes if axis not in self.mesh.degrees]
            if unknown:
                raise ConfigError(
                    VERIFY_NAMES.problem(
                        f"names: {name} is split over {unknown[0]}, which MESH does not have",
                        suggestions=self.mesh.degrees,
                    )
                )
            place = self.mesh.index(self.rank, axes)
            elements = equal_slice(elements, target.dim, self.mesh.degree(axes), place)
        return canonical, elements


def _with_layer(target: str | Logical | Fused, layer: str) -> str | Logical | Fused:
    if isinstance(target, str):
        return target.replace(_LAYER, layer)
    if isinstance(target, Logical):
        return Logical(
            name=target.name.replace(_LAYER, layer),
            dim=target.dim,
            axis=target.axis,
            part=target.part,
        )
    parts = tuple(
        part for one in target.parts if isinstance(part := _with_layer(one, layer), Logical)
    )
    return Fused(parts=parts, dim=target.dim, groups=target.groups)


def _with_offset(name: str, offset: int) -> str:
    if not offset:
        return name
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda match: str(int(match[0]) + offset), name, count=1)


def _shape_hints(shape: Sequence[int], whole: Sequence[int], mesh: NamedMesh) -> list[str]:
    """Return what would fit: an axis whose degree is the ratio of one dim."""
    if len(shape) != len(whole):
        return []
    ratios = {
        dim: (total // size if size else 0)
        for dim, (size, total) in enumerate(zip(shape, whole, strict=True))
        if size != total
    }
    if len(ratios) != 1:
        return []
    ((dim, ratio),) = ratios.items()
    degrees: Mapping[str, int] = mesh.degrees
    return [f'Logical(dim={dim}, axis="{a}")' for a, degree in degrees.items() if degree == ratio]
