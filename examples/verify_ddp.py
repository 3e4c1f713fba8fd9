"""Prove a program of your own: `echelon prove --subject examples/verify_ddp.py`.

Two replicas under DDP beside one device. Rows have different numbers of tokens, so a mean of means
would show; gradients are clipped, so a wrong norm would.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float32
VOCAB, WIDTH, ROWS, LENGTH = 17, 8, 4, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 3:] = labels[1, 2:] = -100
    return ids[:, :-1], labels


def token_losses(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")


def optimizer_of(model: nn.Module, rate: float = 1e-2, decay: float = 0.1) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    torch.manual_seed(case.seed)
    model = Net().to(case.dtype)

    def loss(step: int) -> torch.Tensor:
        ids, labels = batch(step)
        return token_losses(model, ids, labels) / (labels != -100).sum()

    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer_of(model), clip_norm=0.5)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    torch.manual_seed(case.seed)
    model = DDP(Net().to(case.dtype))
    optimizer = optimizer_of(model)
    rank, dp = case.mesh["dp"], case.degrees["dp"]

    def step(number: int) -> dict[str, torch.Tensor]:
        ids, labels = (rows.chunk(dp)[rank] for rows in batch(number))
        tokens = (batch(number)[1] != -100).sum()
        loss = token_losses(model, ids, labels) * dp / tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
