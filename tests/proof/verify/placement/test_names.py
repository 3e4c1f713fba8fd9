"""The user's table of names: one entry for all layers, slices, fused tensors, and what misfits."""

from __future__ import annotations

import pytest
from torch import nn

from echelon.core.errors import ConfigError
from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import Fused, Logical, Names
from echelon.proof.verify.placement.names import NameTable

SHAPES = {
    "embedding.weight": (6, 2),
    "layers.0.q.weight": (4, 2),
    "layers.1.q.weight": (4, 2),
    "layers.0.k.weight": (2, 2),
    "layers.0.gate_up.weight": (4, 2),
}
LOGICAL = LogicalParameters(shapes=SHAPES, aliases={"head.weight": "embedding.weight"})


def table(names: Names, rank: int = 1) -> NameTable:
    return NameTable(logical=LOGICAL, mesh=NamedMesh({"tp": 2}), rank=rank, names=names)


def test_one_rule_covers_all_layers() -> None:
    q = table({"blocks.{layer}.q": Logical(name="layers.{layer}.q.weight", dim=0, axis="tp")})
    place = q.locate("blocks.1.q", (2, 2))
    assert (place.names, place.index.tolist()) == (("layers.1.q.weight",), [4, 5, 6, 7])
    assert q.locate("blocks.0.q", (2, 2), offset=1).names == ("layers.1.q.weight",)


def test_without_a_rule_the_name_is_the_same_and_layers_count_from_the_offset() -> None:
    plain = table({})
    assert plain.locate("head.weight", (6, 2)).names == ("embedding.weight",)
    assert plain.locate("layers.0.q.weight", (4, 2), offset=1).names == ("layers.1.q.weight",)


def test_modules_have_the_names_of_their_parameters() -> None:
    linear = nn.Linear(2, 2, bias=False)
    q = table({"blocks.{layer}.q.weight": "layers.{layer}.q.weight"})
    assert q.logical_module("blocks.0.q", linear, offset=1) == "layers.1.q"
    assert q.logical_module("layers.0", nn.Sequential(linear), offset=1) == "layers.1"
    fused = table({"qkv.weight": Fused(parts=(Logical(name="layers.0.q.weight"),))})
    assert fused.logical_module("qkv", linear) == "qkv"


def test_fused_tensors_hold_the_slice_of_each() -> None:
    parts = tuple(Logical(name=f"layers.0.{one}.weight", axis="tp") for one in "qk")
    place = table({"qkv": Fused(parts=parts)}).locate("qkv", (3, 2))
    assert place.index.tolist() == [4, 5, 6, 7, 2, 3]
    assert place.owner.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_part_is_of_what_one_device_has_fused() -> None:
    up = Logical(name="layers.0.gate_up.weight", part=(2, 4), axis="tp")
    assert table({"up": up}).locate("up", (1, 2)).index.tolist() == [6, 7]


@pytest.mark.parametrize(
    ("names", "name", "shape", "told"),
    [
        ({}, "layers.0.q.weight", (2, 2), 'works here: Logical(dim=0, axis="tp")'),
        ({}, "layers.0.q.weigth", (4, 2), "layers.0.q.weight"),
        ({"x": "layers.7.q.weight"}, "x", (4, 2), "layers.7.q.weight (of x)"),
        ({"x": Logical(name="embedding.weight", axis="cp")}, "x", (3, 2), "works here: tp"),
    ],
)
def test_what_misfits_is_told(names: Names, name: str, shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError, match="verify-names") as caught:
        table(names).locate(name, shape)
    assert told in str(caught.value)
