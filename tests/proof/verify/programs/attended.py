"""A decoder with documents, padding, positions of two kinds, dropout and a balance loss, over dp.

What a part of the forward pass gets wrong is one changed line.
Shapes: B sequences, T tokens, D width, H heads, K key heads, d width of a head, E experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float64
VOCAB, WIDTH, HEADS, KEY_HEADS, LENGTH, ROWS, EXPERTS = 19, 16, 4, 2, 8, 4, 3
STARTS, PADDED, DROPPED = (0, 5), 7, 0.2


class Dropout(nn.Module):
    """Drops the same elements of a sequence wherever it is."""

    def forward(self, x_BTD: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return the elements that are not dropped."""
        made = [
            torch.rand(x_BTD.shape[1:], generator=torch.Generator().manual_seed(r)) for r in rows
        ]
        return x_BTD * (torch.stack(made) > DROPPED) / (1 - DROPPED)


class Net(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        size = WIDTH // HEADS
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * size, bias=False) for _ in range(2))
        self.o, self.drop = nn.Linear(WIDTH, WIDTH, bias=False), Dropout()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def positions(self) -> torch.Tensor:
        token_T = torch.arange(LENGTH)
        return torch.where(token_T >= STARTS[1], token_T - STARTS[1], token_T)

    def rotated(self, x_BTHd: torch.Tensor) -> torch.Tensor:
        first, second = x_BTHd.chunk(2, -1)
        turn = self.positions()[:, None] / 100.0 ** torch.linspace(0, 1, first.shape[-1])
        cos, sin = (wave.to(first.dtype)[:, None] for wave in (turn.cos(), turn.sin()))
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def mask(self) -> torch.Tensor:
        token_T = torch.arange(LENGTH)
        document_T = token_T >= STARTS[1]
        same_TT = document_T[:, None] == document_T
        return same_TT.tril() & (token_T != PADDED)

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x_BTD).unflatten(-1, (-1, WIDTH // HEADS)) for linear in (self.q, self.k, self.v)
        )
        q, k = self.rotated(q), self.rotated(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        return (
            fn.scaled_dot_product_attention(q, k, v, attn_mask=self.mask())
            .transpose(1, 2)
            .flatten(2)
        )

    def forward(self, ids_BT: torch.Tensor, rows: list[int]) -> torch.Tensor:
        x = self.embed(ids_BT) + self.places(self.positions())
        x = x + self.o(self.attention(x))
        x = x + self.drop(self.up(self.norm(x)), rows)
        self.load = self.router(x).softmax(-1).sum((0, 1))
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def model_of(case: ec.VerifyCase, whole: bool) -> Net:
    torch.manual_seed(case.seed)
    return Net(whole).to(case.dtype)


def optimizer_of(model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def losses(model: Net, step: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of token losses, and a balance loss that is linear in the tokens."""
    ids_BT, labels_BT = (x[rows] for x in batch(step))
    logits_BTV = model(ids_BT, rows)
    total = fn.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
    return total, (model.load * torch.arange(EXPERTS)).sum()


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    model = model_of(case, True)
    optimizer, scheduler = optimizer_of(model)

    def loss(step: int) -> torch.Tensor:
        total, balance = losses(model, step, list(range(ROWS)))
        return total / (ROWS * LENGTH) + 0.1 * balance / (ROWS * LENGTH)

    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, scheduler=scheduler)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    model = model_of(case, False)
    optimizer, scheduler = optimizer_of(model)
    dp = case.degrees["dp"]

    def step(number: int) -> torch.Tensor:
        own = list(range(ROWS))[case.mesh["dp"] :: dp]
        total, balance = losses(model, number, own)
        loss = (total + 0.1 * balance) / (ROWS * LENGTH)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss * dp

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
