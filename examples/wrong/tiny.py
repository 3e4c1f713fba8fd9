"""The small decoder, its data and its loss, which the programs of this folder train.

One file says it once, so that each program shows only what is wrong in it.
Shapes: B sequences, T tokens, D hidden, V vocabulary, H heads, N = B x T.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as fn

import echelon as ec

VOCAB, HIDDEN, FFN, HEAD, BLOCKS = 64, 32, 64, 8, 4
LENGTH, SEQUENCES, RATE = 12, 8, 1e-3
IGNORED = -100


class Block(nn.Module):
    """Attention and a feed-forward layer; it reads its number of heads off the width of q."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        x_BTD = x_BTD + self.o(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.feed_forward(self.norm2(x_BTD))

    def feed_forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
        """Return what the two layers add to the stream."""
        return self.down(fn.gelu(self.up(h_BTD)))

    def attention(self, h_BTD: torch.Tensor) -> torch.Tensor:
        """Return causal attention over the heads that this rank has."""
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (self.q(h_BTD), self.k(h_BTD), self.v(h_BTD))
        )
        out_BHTd = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out_BHTd.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head; or the part of it that one stage holds."""

    def __init__(self, tied: bool = False) -> None:
        """Make the whole model; `tied` shares the weight of embedding and head."""
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(BLOCKS)})
        self.norm: nn.Module | None = nn.RMSNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, VOCAB, bias=False)
        # Embeddings of size 1 would drown what the blocks do, and the mistakes in them.
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV of tokens_BT; a stage takes and gives x_BTD in the middle."""
        x = self.stream(x)
        return x if self.head is None else self.head(x)

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return x_BTD before the head."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None else self.norm(x)

    def stage(self, index: int, count: int) -> "Decoder":
        """Keep the part of stage `index` of `count`, with the names of the whole."""
        size = BLOCKS // count
        for name in list(self.blocks):
            if int(name) // size != index:
                del self.blocks[name]
        if index > 0:
            self.embed = None
        if index < count - 1:
            self.norm = self.head = None
        return self


def decoder(case: ec.VerifyCase, tied: bool = False) -> Decoder:
    """Return the model with the initial values that every rank and one device share."""
    torch.manual_seed(case.seed)
    return Decoder(tied).to(case.dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs_BT and labels_BT of one step."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def rows(step: int, index: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences of part `index` of `count` (a replica, or a microbatch of it)."""
    inputs_BT, labels_BT = batch(step)
    return inputs_BT.chunk(count)[index], labels_BT.chunk(count)[index]


def cross_entropy(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the mean (or sum) of the token losses."""
    return fn.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction=reduction, ignore_index=IGNORED
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer, the same everywhere."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def mesh_of(case: ec.VerifyCase, axes: dict[str, int]) -> DeviceMesh:
    """Return torch's mesh over the axes of a program."""
    kind = torch.device(case.device).type
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def plain_training(case: ec.VerifyCase, tied: bool = False) -> ec.OneDevice:
    """Return the truth for most programs: all sequences of a step on one device."""
    model = decoder(case, tied)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))
