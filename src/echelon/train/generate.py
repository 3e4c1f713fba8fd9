"""Write text with a trained model, on one device: what the demo shows at its end."""

from __future__ import annotations

import numpy as np
import torch

from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.train.data.dataset import document_starts


@torch.no_grad()
def generate(
    decoder: Decoder,
    tokens: list[int],
    count: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    separator: int | None = None,
) -> list[int]:
    """Return `count` token ids that continue `tokens`, sampled at `temperature`.

    The whole context is run again for each token: right for a few hundred tokens of a small model.
    One that was trained on separate documents does not look beyond the last `separator`. Experts
    are chosen as the decoder's `operations.routing` says.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(tokens)
    for _ in range(count):
        recent = written[-decoder.shape.max_positions :]
        context = torch.tensor(recent)
        whole = TokenBatch.from_rows(
            context[None],
            torch.full_like(context, IGNORED_LABEL)[None],
            torch.zeros(1, dtype=torch.int64),
            train=False,
        )
        documents = None
        if separator is not None:
            documents = document_starts(np.array([recent]), separator)
        batch = whole.cut((), documents)
        x_ND = decoder.norm(decoder.hidden(None, batch)[-1:])
        logits_V = decoder.operations.logits(x_ND, decoder.head_weight)[0]
        weights_V = (logits_V / temperature).softmax(-1)
        written.append(int(torch.multinomial(weights_V, 1, generator=generator)))
    return written[len(tokens) :]
