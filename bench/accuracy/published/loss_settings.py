"""What a loss holds for each logit, as a row names it, in a column or in words.

whole       what is usual for its trainer
in-place    the gradient of a logit takes its place; in 16 bits in Transformer Engine's kernel
narrow      as it is written, but log-softmax and its gradients are in 16 bits, as logits are
chunked N   logits stay whole in 16 bits, their fp32 copies come in N pieces; of TRL and LLM.Q
            the logits themselves do
compiled    one graph: a logit and its gradient in 16 bits
fused       a kernel of the head and the loss together, which has a few logits at a time; of
            Megatron-LM kernels over logits that are whole, of torchtitan a compiled loss
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.accuracy.published.memory_settings import is_compiled, words_of
from bench.accuracy.published.rows import Refused, Row
from echelon.core.rulebook.config import OUT_OF_RANGE

LOGITS_HELD: Mapping[str, float] = {"in-place": 4.0, "fused": 0.25, "narrow": 8.0}
"""Bytes that a loss holds for each logit: gradients in the place of logits; a sixteenth of them or
less at a time, in fp32 (Liger, cut-cross-entropy); logits, log-softmax and two gradients in 16 bits
(torch.nn.functional.cross_entropy of logits that nobody widens)."""
CORE_IN_PLACE = 2.0
"""The same of Transformer Engine, up to its pull request 3193 of July 2026, since which the
gradient is another tensor in fp32 (transformer_engine/pytorch/triton/cross_entropy.py)."""
CORE_FUSED = 10.0
"""Of Megatron-Core's own fused loss: logits, their fp32 copy, and probabilities, which a compiler
writes elsewhere (megatron/core/fusions/fused_cross_entropy.py)."""
CHUNKED_LOGITS = 4.0
"""Bytes of a logit and of its gradient in 16 bits, which stay whole while fp32 copies come in
chunks (torchtune modules/loss, torchtitan)."""
WIDE_LOGITS = 12.0
"""Bytes of a logit in a chunk: log-softmax in fp32, and two gradients of it."""
COMPILED_WIDE_LOGITS = 6.0
"""Bytes of a logit in a chunk of a compiled loss: in fp32, and its gradient in 16 bits."""
COMPILED_PURE = 4.0
"""Bytes of a logit and its gradient in 16 bits, all that a compiled loss holds of them."""
LOSS_COMPILED_SINCE = 2025
"""The year from which torchtitan compiles the loss with the model (`compile.components`)."""
WHOLE_HEADS = ("trl", "llm.q", "llmq")
"""Trainers whose chunks have the product of the head in them, so that no logit is whole
(trl/trainer, its chunked loss; llmq, --lmhead-chunks)."""
USUAL_CHUNKS = 8.0
"""Pieces of a loss in chunks where nobody says (torchtune, `num_output_chunks`)."""


def logits_held(row: Row, usual: float) -> float:
    """Return the bytes that the loss holds for each logit; Refused where its word is not known."""
    word = row.word("loss").lower() or _loss_in_words(row)
    if not word or word == "whole":
        return usual
    name = row.word("framework").lower()
    chunks = re.fullmatch(r"chunked\s+([1-9]\d{0,6})", word)
    if chunks and any(one in name for one in WHOLE_HEADS):
        return usual / float(chunks[1])
    if chunks:
        wide = COMPILED_WIDE_LOGITS if is_compiled(row) else WIDE_LOGITS
        return min(usual, CHUNKED_LOGITS + wide / float(chunks[1]))
    if word == "fused" and "megatron" in name and "liger" not in words_of(row):
        return CORE_FUSED
    if word == "compiled" or (word == "fused" and "titan" in name):
        return min(usual, COMPILED_PURE)
    if word == "in-place" and re.search(r"megatron|nemo|bridge", name):
        return CORE_IN_PLACE
    if word in LOGITS_HELD:
        return LOGITS_HELD[word]
    known = "whole, narrow, in-place, fused, compiled, chunked N"
    raise Refused(OUT_OF_RANGE, f"loss = {word} is none of {known}")


def compiles_loss(row: Row) -> bool:
    """Return whether the loss of a compiled model is compiled, too."""
    if row.word("loss"):
        return "of the loss" in words_of(row)
    late = (row.number("year") or 0.0) >= LOSS_COMPILED_SINCE
    return late and "titan" in row.word("framework").lower()


def _loss_in_words(row: Row) -> str:
    text = words_of(row)
    if re.search(r"fused linear cross[- ]?entropy|liger|cut[- ]cross[- ]?entropy|\bflce\b", text):
        return "fused"
    chunks = re.search(r"(?:loss|cross[- ]?entropy|\bce\b)[^;,]{0,20}\b([1-9]\d*) chunks", text)
    if chunks:
        return f"chunked {chunks[1]}"
    if re.search(r"chunked (?:loss|cross[- ]?entropy|ce\b)|loss in chunks", text):
        return f"chunked {USUAL_CHUNKS:g}"
    return ""
