"""The small decoder of the programs that split attention: rotary positions, masks by position.

Shapes: B sequences, T tokens (of this rank), H heads, E features of a head, D hidden, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as fn

import echelon as ec

VOCAB, HIDDEN, HEADS, LENGTH, ROWS, BLOCKS = 40, 16, 4, 12, 4, 2
CLIP_NORM, RATE = 0.5, 1e-3


def rotate(x_BHTE: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate halves of each head by the angle of its position."""
    half = x_BHTE.shape[-1] // 2
    rates = 1000.0 ** (-torch.arange(half, dtype=x_BHTE.dtype) / half)
    angles_TE = positions_T.to(x_BHTE.dtype)[:, None] * rates
    a, b = x_BHTE[..., :half], x_BHTE[..., half:]
    cos, sin = angles_TE.cos(), angles_TE.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Queries, keys and values by layers of their own; the split of a rank replaces `mix`."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x_BTD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from those before it."""
        q, k, v = (
            layer(x_BTD).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y_BHTE = self.mix(rotate(q, positions_T), rotate(k, positions_T), v)
        return self.o(y_BHTE.transpose(1, 2).flatten(2))

    def mix(self, q_BHTE: torch.Tensor, k_BHTE: torch.Tensor, v_BHTE: torch.Tensor) -> torch.Tensor:
        """Return causal attention."""
        return fn.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)


class Block(nn.Module):
    """Attention and a feed-forward layer beside the stream."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x_BTD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), positions_T)
        return x_BTD + self.down(fn.gelu(self.up(self.norm2(x_BTD))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, ids_BT: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV."""
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, positions_T)
        return self.head(self.norm(x_BTD))


def decoder(case: ec.VerifyCase) -> Decoder:
    """Return the model with the initial values that every rank and one device share."""
    torch.manual_seed(case.seed)
    return Decoder().to(case.dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs_BT and labels_BT of one step."""
    made = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=made)
    return ids[:, :-1], ids[:, 1:]


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of the token losses."""
    return fn.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device."""
    model = decoder(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return summed_loss(model(inputs_BT, torch.arange(LENGTH)), labels_BT) / labels_BT.numel()

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)
