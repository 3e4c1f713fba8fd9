"""The model, batches and one device that all programs of this folder share.

Copied beside each program: a program is one file and what it imports from its own folder.
"""

import torch
from torch import nn
from torch.nn import functional as F

import echelon as ec

VOCAB, WIDTH, ROWS, LENGTH = 16, 8, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def built(case):
    torch.manual_seed(case.seed)
    return Net().to(case.dtype)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def one_device(case):
    model = built(case)

    def loss(step):
        ids, labels = batch(step)
        return loss_of(model(ids), labels)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model.parameters()))
