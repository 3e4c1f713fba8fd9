# SPDX-License-Identifier: Apache-2.0
"""Which linear layers share scales of whole tensors: those that read the same input.

A group has one scale for its input, one for the gradient of its outputs side by side, one for its
weights side by side: so what is one product on a rank has one scale on either side. All experts of
a layer share theirs, for which rank has which expert, and how many rows it gets, is no part of the
mathematics.
"""

from __future__ import annotations

import re

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters

_WEIGHT = re.compile(
    r"(?P<block>layers\.\d+)\.(?P<part>attention|mlp|mlp\.shared|mlp\.experts)(?:\.\d+)?"
    r"\.(?P<layer>q|k|v|o|q_up|kv_up|gate|up|down)\.weight"
)
_TOGETHER = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def fp8_group_of(weight: str) -> str | None:
    """Return the group of a weight by its canonical name; None where it is never in 8 bits."""
    found = _WEIGHT.fullmatch(weight)
    if found is None:
        return None
    layer = found["layer"]
    return f"{found['block']}.{found['part']}.{_TOGETHER.get(layer, layer)}"


def fp8_groups(model: ModelShape) -> tuple[str, ...]:
    """Return the groups of a model in forward order, the same on every rank."""
    found = (fp8_group_of(spec.name) for spec in parameters(model))
    return tuple(dict.fromkeys(name for name in found if name is not None))
