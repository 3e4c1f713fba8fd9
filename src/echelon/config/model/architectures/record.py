# SPDX-License-Identifier: Apache-2.0
"""What is known of an architecture: how its config.json is read, and how it says a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from echelon.config.model.config_json import ConfigJsonReader
from echelon.core.model_shape import ModelShape

Keys: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Hold both ways between the config.json of a model_type and a shape."""

    models: str
    """Whose models have it."""
    name: str
    """Its class in transformers."""
    read: Callable[[ConfigJsonReader], None]
    """Takes the settings of a model out of a config.json."""
    keys: Callable[[ModelShape], Keys]
    """Says a shape in its keys; what it has no key for is not looked at."""
    taken: str
    """What of its blocks is computed, in words."""
    tensors: tuple[str, ...] = ("model.embed_tokens.weight",)
    """Some of its tensors, by which its names are known."""
    experts: bool = False
    """Whether its models have experts."""
    latent: bool = False
    """Whether they have latent attention."""
    whole_heads: bool = False
    """Whether transformers wants the width of the stream to be a multiple of the heads, though they
    may have any width."""

    def more_tensors(self, shape: ModelShape) -> tuple[str, ...]:
        """Return what shows the names of some of its models."""
        if self.name == "FalconForCausalLM" and shape.residual == "parallel":
            return ("transformer.h.0.ln_mlp.weight",)
        return ()

    def why_not(self, shape: ModelShape) -> str:
        """Return what transformers would refuse; "" where it reads the shape."""
        if self.whole_heads and shape.hidden % shape.heads:
            return (
                f"model.hidden = {shape.hidden} is no multiple of model.heads = {shape.heads} "
                f"({shape.hidden} % {shape.heads} = {shape.hidden % shape.heads}), which "
                f"{self.name} wants"
            )
        return ""
