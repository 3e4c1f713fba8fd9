"""A vocabulary that does not divide: the rows that pad it take part in the softmax.

What you would have seen: a loss that is a little too large from step 1 on (here by 1.5%), and more
so the longer one trains at a high rate: the padding learns, too.
Public issue: https://github.com/NVIDIA/Megatron-LM/issues/1754 (open: 50,257 tokens over two
ranks).
Cause: the vocabulary is padded until it divides by the tensor-parallel degree; the logits of the
padding are in every denominator, and no label ever points at them.
Made here in few lines: the head's last shard is one row short, and is padded with zeros.
Mended here: logits of the padding are masked.
"""

import torch
from tiny import HIDDEN, adamw, batch, cross_entropy, decoder, mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as fn

import echelon as ec

MESH = {"tp": 2}
VOCAB = 63
"""Tokens; two ranks have 32 rows each, and one row is nobody's."""


class Odd(nn.Module):
    """The small decoder's stream with a head of 63 tokens."""

    def __init__(self, case: ec.VerifyCase) -> None:
        """Make the weights."""
        super().__init__()
        self.decoder = decoder(case)
        self.decoder.norm = self.decoder.head = None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=case.dtype)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV."""
        return self.head(self.decoder(tokens_BT))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of 63 tokens."""
    inputs_BT, labels_BT = batch(step)
    return inputs_BT % VOCAB, labels_BT % VOCAB


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, where nothing is padded."""
    model = Odd(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = data(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Let the padding's logits into the softmax."""
    return train(case, mask=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Mask them."""
    return train(case, mask=True)


def train(case: ec.VerifyCase, mask: bool) -> ec.OnRank:
    """Return this tensor rank: the head is split over the vocabulary."""
    model = Odd(case)
    mesh = mesh_of(case, MESH)
    whole = model.head.weight.detach()
    model.head.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    rows = -(-VOCAB // MESH["tp"])
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = data(number)
        own = model.head.weight.to_local()
        padded_VD = fn.pad(own, (0, 0, 0, rows - own.shape[0]))
        stream = DTensor.from_local(model.decoder(inputs_BT), mesh, [Replicate()])
        part = fn.linear(stream.to_local(grad_placements=[Partial()]), padded_VD)
        logits_BTV = DTensor.from_local(part, mesh, [Shard(2)]).full_tensor()
        if mask:
            logits_BTV = logits_BTV[..., :VOCAB]
        loss = cross_entropy(logits_BTV, labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
