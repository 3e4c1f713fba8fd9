"""What an asynchronous worker and a server tell each other beside ranges."""

from __future__ import annotations

from typing import Any, cast

import torch

from echelon.cost.bytes.servers import NUMBERS_BYTES
from echelon.parallel.servers import (
    BEGIN,
    LEAVES,
    NUMBERS,
    SERVER,
    WORKER,
    receive_numbers,
    send_numbers,
)
from echelon.parallel.transport.collectives import Pending


class Pair:
    """A link that keeps what is sent, by place and tag."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Keep a message."""
        self.sent[index, tag] = tensor
        return Pending()

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Give what the other end sent here."""
        tensor.copy_(self.sent[1 - index, tag])
        return Pending()


def test_three_numbers_travel_as_float64() -> None:
    """S07: a step, a version and a count are exact; their bytes are those of the formula."""
    pair = cast(Any, Pair())
    send_numbers(pair, SERVER, BEGIN, 2**40 + 1, 7, 12345)

    assert receive_numbers(pair, WORKER, BEGIN) == [2**40 + 1, 7, 12345]
    assert pair.sent[SERVER, BEGIN].nbytes == NUMBERS_BYTES == 8 * NUMBERS
    assert LEAVES < 0
