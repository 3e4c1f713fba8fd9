# SPDX-License-Identifier: Apache-2.0
"""All architectures by model_type, the plainest first: the first that says a shape is taken."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.model.architectures.common import Architecture
from echelon.config.model.architectures.gemma import GEMMAS
from echelon.config.model.architectures.gpt import FUSED, GPT_LIKE
from echelon.config.model.architectures.llama import LLAMA_LIKE
from echelon.config.model.architectures.mixtures import MIXTURES

NOT_COMPUTED: Mapping[str, str] = {
    "bloom": "its positions are slopes of scores (ALiBi)",
    "cohere": "its norms of layers have no bias",
    "gptj": "its head has a bias",
    "llama4_text": (
        "its local blocks attend in chunks of the sequence, not in a window; its blocks without "
        "positions scale queries by the position; its heads are normed after they are turned; its "
        "experts get inputs that are weighted; and experts are in each so-many-th block. "
        "What there is: blocks without positions, sigmoid scores, a shared expert"
    ),
    "mamba": "it has no attention",
    "mpt": "its positions are slopes of scores (ALiBi)",
    "opt": "its MLP has ReLU, and its table of positions an offset",
    "phi": "its head has a bias",
    "qwen3_next": (
        "three of four blocks have linear attention (Gated DeltaNet), its others a gate on the "
        "output, and its shared expert has a gate, too. What there is: heads of which a part "
        "turns, norms of heads that files keep 1 less of, softmax scores, a shared expert"
    ),
}
"""What of an architecture is not computed, for some that are asked for."""

ARCHITECTURES: Mapping[str, Architecture] = {
    **LLAMA_LIKE,
    **MIXTURES,
    **GPT_LIKE,
    **FUSED,
    **GEMMAS,
}
