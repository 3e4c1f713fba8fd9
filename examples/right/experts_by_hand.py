"""Expert parallelism by hand: tokens go to the rank of their expert by all-to-all, and come back.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE`.
The ranks are replicas for all else. The balance loss is that of the whole batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from ddp import HIDDEN, IGNORED, VOCAB, batch, summed_loss
from torch import nn
from torch.nn import functional as fn

import echelon as ec

MESH = {"ep": 2}
EXPERTS, BALANCE, CLIP_NORM = 4, 0.1, 0.5


class Mixture(nn.Module):
    """One expert of several for each token, times its probability."""

    def __init__(self) -> None:
        """Make router and experts."""
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up_EDF = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) * 0.2)
        self.down_EFD = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) * 0.2)
        self.balance = torch.zeros(())

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream after the layer."""
        h_ND = self.norm(x_BTD).flatten(0, 1)
        probabilities_NE = self.router(h_ND).softmax(-1)
        weight_N, expert_N = probabilities_NE.max(-1)
        self.balance = self.balance_of(probabilities_NE, expert_N)
        y_ND = self.experts(h_ND, expert_N)
        return x_BTD + (weight_N[:, None] * y_ND).view_as(x_BTD)

    def balance_of(self, probabilities_NE: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        """Return the share of tokens of each expert times its mean probability."""
        counts_E = torch.bincount(expert_N, minlength=EXPERTS).to(probabilities_NE.dtype)
        tokens = torch.tensor(float(len(expert_N)), dtype=counts_E.dtype)
        if dist.is_initialized():
            dist.all_reduce(counts_E)
            dist.all_reduce(tokens)
        return EXPERTS * (counts_E / tokens * probabilities_NE.sum(0) / tokens).sum()

    def experts(self, h_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        """Return what each token's expert makes of it."""
        y_ND = torch.zeros_like(h_ND)
        for index, (up_DF, down_FD) in enumerate(zip(self.up_EDF, self.down_EFD, strict=True)):
            place = expert_N == index
            y_ND[place] = fn.gelu(h_ND[place] @ up_DF) @ down_FD
        return y_ND


class Exchange(torch.autograd.Function):
    """Send rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send `sent[i]` rows to rank i, take `received[i]` from it."""
        ctx.counts = sent, received
        out_MD = x_ND.new_empty(sum(received), x_ND.shape[1])
        dist.all_to_all_single(out_MD, x_ND.contiguous(), received, sent)
        return out_MD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send them back."""
        sent, received = ctx.counts
        return Exchange.apply(grads[0], received, sent), None, None


def spread(layer: Mixture) -> None:
    """Keep this rank's experts of a layer, and send tokens to them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = EXPERTS // world
    layer.up_EDF = nn.Parameter(layer.up_EDF.detach().chunk(world)[rank].clone())
    layer.down_EFD = nn.Parameter(layer.down_EFD.detach().chunk(world)[rank].clone())
    own_experts = layer.experts

    def experts(h_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        order_N = expert_N.argsort(stable=True)
        sent = torch.bincount(expert_N // per_rank, minlength=world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts = sent.tolist(), received.tolist()
        number_M = torch.empty(sum(counts[1]), dtype=torch.int64)
        dist.all_to_all_single(number_M, expert_N[order_N], counts[1], counts[0])
        rows_MD = Exchange.apply(h_ND[order_N], *counts)
        y_MD = own_experts(rows_MD, number_M - rank * per_rank)
        back_ND = Exchange.apply(y_MD, counts[1], counts[0])
        return back_ND[order_N.argsort()]

    layer.experts = experts


def model_of(case: ec.VerifyCase) -> nn.Sequential:
    """Return the model with the initial values that every rank and one device share."""
    torch.manual_seed(case.seed)
    ends = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    return nn.Sequential(ends[0], Mixture(), Mixture(), ends[1]).to(case.dtype)


def balance_of(model: nn.Sequential) -> torch.Tensor:
    """Return the sum of the balance losses."""
    return torch.stack([x.balance for x in model if isinstance(x, Mixture)]).sum()


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch, and the balance loss."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        mean = summed_loss(model(inputs_BT), labels_BT) / (labels_BT != IGNORED).sum()
        return mean + BALANCE * balance_of(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train the rows of this rank, with its experts."""
    model = model_of(case)
    for layer in model:
        if isinstance(layer, Mixture):
            spread(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = {name: p for name, p in model.named_parameters() if name.endswith(("_EDF", "_EFD"))}
    shared = [p for name, p in model.named_parameters() if name not in own]
    names = {
        f"{{layer}}.{weight}": ec.Logical(name=f"{{layer}}.{weight}", axis="ep")
        for weight in ("up_EDF", "down_EFD")
    }

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = (x.chunk(MESH["ep"])[case.mesh["ep"]] for x in batch(number))
        labels = (batch(number)[1] != IGNORED).sum()
        loss = summed_loss(model(inputs_BT), labels_BT) / labels + BALANCE * balance_of(model)
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
        square = torch.stack([p.grad.square().sum() for p in own.values()]).sum()
        dist.all_reduce(square)
        norm = (square + torch.stack([p.grad.square().sum() for p in shared]).sum()).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer, names=names)
