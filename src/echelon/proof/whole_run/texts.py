# SPDX-License-Identifier: Apache-2.0
"""Made-up documents for a whole run, of lengths at which every rule of the trainer's data is met.

An epoch ends inside of the second step, and the last sample of either part is not full. A document
ends where the held-out part begins, so there is one place where a trainer may cut. The first sample
of either part has two ends of documents in a row and a third as its last token, and the next sample
begins with an end: two documents are empty. Prompts have ends at such places, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from echelon.core.plan import Plan

END_OF_DOCUMENT = 256
"""The token id that the byte tokenizer puts after each document."""
VOCABULARY = 257
"""Token ids of the byte tokenizer."""
PROMPTS: tuple[tuple[int, ...], ...] = (
    (*b"the ",),
    (*b"a", END_OF_DOCUMENT, END_OF_DOCUMENT, *b"b"),
    (END_OF_DOCUMENT, *b"of"),
    (*b"so", END_OF_DOCUMENT),
    (*b"it", END_OF_DOCUMENT, END_OF_DOCUMENT),
)
"""Prompts: of one document, with two ends in a row, with an end first, and with one or two last."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTexts:
    """Hold the documents of both parts, in order."""

    training: tuple[str, ...]
    validation: tuple[str, ...]

    @property
    def training_tokens(self) -> list[int]:
        """Return the token ids that are trained on."""
        return _tokens(self.training)

    @property
    def validation_tokens(self) -> list[int]:
        """Return the token ids that are held out."""
        return _tokens(self.validation)

    @property
    def validation_fraction(self) -> float:
        """Return the share of tokens that is held out."""
        held_out = len(self.validation_tokens)
        return held_out / (held_out + len(self.training_tokens))


def texts_for(plan: Plan) -> RunTexts:
    """Return documents of a few random letters, drawn by the seed of the plan."""
    mathematics = plan.mathematics
    length, count = mathematics.sequence_length, mathematics.global_sequences
    generator = random.Random(mathematics.seed)
    return RunTexts(
        training=_documents(_num_tokens(length, count + max(1, count // 2)), length, generator),
        validation=_documents(_num_tokens(length, count + 1), length, generator),
    )


def _num_tokens(length: int, num_samples: int) -> int:
    """Return tokens for so many samples, of which the last is half full."""
    return (num_samples - 1) * length + length // 2 + 1


def _documents(num_tokens: int, length: int, generator: random.Random) -> tuple[str, ...]:
    """Return documents that are `num_tokens` with their ends, some longer than a sequence."""
    sizes = [3, 1, length - 4, 1]
    left = num_tokens - sum(sizes)
    while left:
        size = min(left, generator.randint(2, 3 * length // 2))
        # A document of one token would be another end alone.
        sizes.append(left if left - size < 2 else size)
        left -= sizes[-1]
    return tuple("".join(generator.choices(_LETTERS, k=size - 1)) for size in sizes)


def _tokens(documents: tuple[str, ...]) -> list[int]:
    return [token for text in documents for token in (*text.encode(), END_OF_DOCUMENT)]
