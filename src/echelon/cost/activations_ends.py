"""What both ends of the model keep: the lookup of tokens, the last norm, logits and loss.

In the letters of `cost/activation_numbers.py`. The logits of a rank, [N, V], wait for backward in
the dtype of the parameters; of the softmax only numbers for each token are kept beside them
(`parallel/vocabulary.py`).

Source: Korthikanti et al., 2022, section 4.3 (input and output layers), for a loss that is split
over the vocabulary (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from echelon.cost.activation_numbers import (
    INDEX_BYTES,
    WIDE_BYTES,
    ActivationNumbers,
    Operator,
    Saved,
    most,
)
from echelon.cost.activations_linear import dropout, norm

BOOL_BYTES = 1


def embedding_operators(x: ActivationNumbers) -> tuple[Operator, ...]:
    """Return the operators of the embedding; the stream that it makes is the first block's."""
    name = "embedding"
    # Where the vocabulary is split each rank has the gradients of the rows that it looked up.
    alone = x.shared
    gathered = x.scattered * x.whole
    ids = x.tokens * (INDEX_BYTES + BOOL_BYTES)
    gradient = (1 + x.dropout) * x.stream
    looked_up = gathered + alone * x.found * (INDEX_BYTES + x.hidden * x.size)
    widened = x.mixed * x.found * x.hidden * WIDE_BYTES
    saved = (
        Saved(
            operator=name,
            name="ids",
            bytes=x.tokens * (INDEX_BYTES + BOOL_BYTES),
            formula="N (8 + 1)",
        ),
    )
    positions = Saved(
        operator="positions",
        name="positions",
        bytes=x.learned * x.rows * INDEX_BYTES,
        formula="n 8",
    )
    waits = Saved(
        operator=name,
        name="ids and gradients",
        bytes=x.found * (INDEX_BYTES + x.hidden * x.size),
        formula="N' (8 + D s)",
    )
    return (
        Operator(
            name=name,
            saved=saved,
            waits=(waits,),
            forward=ids + x.whole + x.scattered * x.stream,
            backward=gradient + looked_up + widened,
            split=gradient + looked_up,
        ),
        Operator(
            name="positions",
            saved=(positions,),
            waits=(
                positions,
                Saved(
                    operator="positions",
                    name="gradients",
                    bytes=x.learned * alone * x.stream,
                    formula="n D s",
                ),
            ),
            forward=x.learned * (2 * positions.bytes + 3 * x.stream),
            backward=gradient + x.learned * x.mixed * x.rows * x.hidden * WIDE_BYTES,
            split=gradient,
        ),
        dropout(x, "embedding dropout", adds=0),
    )


def head_operators(x: ActivationNumbers) -> tuple[Operator, ...]:
    """Return the operators of the last norm and of the loss."""
    name = "loss"
    each = (x.wide, x.wide, INDEX_BYTES, BOOL_BYTES)
    logits = Saved(operator=name, name="logits", bytes=x.tokens * x.vocab * x.size, formula="N V s")
    piece = x.piece(x.tokens, x.vocab) * x.vocab
    widened = x.narrow * piece * WIDE_BYTES
    product = x.mixed * x.vocab * x.hidden * x.size
    statistics = (6 + 3 * x.shared * x.tp) * x.tokens * x.wide
    saved = x.whole + logits.bytes + x.tokens * sum(each)
    return (
        norm(x, "last norm"),
        Operator(
            name=name,
            saved=(
                Saved(operator=name, name="input", bytes=x.whole, formula="N D s"),
                logits,
                Saved(
                    operator=name,
                    name="numbers of tokens",
                    bytes=x.tokens * sum(each),
                    formula="N (2 w + 8 + 1)",
                ),
            ),
            waits=(
                logits,
                Saved(operator=name, name="input, weighted", bytes=x.whole, formula="N D s"),
            ),
            forward=saved + statistics + x.scattered * x.stream + widened,
            backward=most(
                (2 - x.narrow) * x.whole + x.scattered * x.stream + x.tokens * x.wide + product,
                widened,
            ),
            split=most(
                (2 - x.narrow) * x.whole + x.scattered * x.stream + x.tokens * x.wide, widened
            ),
        ),
    )
