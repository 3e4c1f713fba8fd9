"""What a model writes depends on what it was trained to look at."""

from __future__ import annotations

import torch

from echelon.models.decoder import Decoder
from echelon.training.whole_run import continue_tokens
from tests.parallel.layouts import NANO

END = 36


def decoder() -> Decoder:
    torch.manual_seed(3)
    model = Decoder(NANO)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_a_model_of_separate_documents_does_not_look_beyond_the_last_end() -> None:
    model = decoder()
    prompt = [5, 9, 2]
    # Rotary positions are relative: inside of a document only what stands in it matters.
    alone = continue_tokens(model, prompt, 4, temperature=0.1, separator=END)
    assert alone == continue_tokens(model, prompt, 4, temperature=0.1)
    for before in ([7, 30, END], [1, 1, END, END]):
        after = continue_tokens(model, [*before, *prompt], 4, temperature=0.1, separator=END)
        assert after == alone
    joined = [
        continue_tokens(model, [*before, *prompt], 4, temperature=0.1)
        for before in ([7, 30, END], [1, 1, END, END], [20, END, 4, END])
    ]
    assert any(one != alone for one in joined)
