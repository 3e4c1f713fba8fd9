"""All architectures by model_type, the plainest first: the first that says a shape is taken."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.model.architectures.fused import FUSED
from echelon.config.model.architectures.gemma import GEMMAS
from echelon.config.model.architectures.gpt import GPT_LIKE
from echelon.config.model.architectures.llama import LLAMA_LIKE
from echelon.config.model.architectures.mixtures import MIXTURES
from echelon.config.model.architectures.record import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    **LLAMA_LIKE,
    **MIXTURES,
    **GPT_LIKE,
    **FUSED,
    **GEMMAS,
}
