"""Expert parallelism under FSDP2: every expert's gradient is ep times too large.

What you would have seen: the right loss, and nearly the same curve: AdamW forgives a constant
factor. The clip norm is too large, so clipping bites too early; with SGD the experts learn twice
as fast as the rest.
Public issue: https://github.com/pytorch/pytorch/issues/160285 (open; the same in Megatron-FSDP:
https://github.com/NVIDIA/Megatron-LM/pull/5956).
Cause: an expert's tokens come from every expert-parallel rank, so its gradient already is a sum
over ep ranks' data; FSDP2 divides by the size of the mesh that it was given, which leaves those
out. It is so in torch 2.13: what divides is for the caller to say.
Mended here: `set_gradient_divide_factor` with the number of all ranks that brought tokens.
"""

import torch
import torch.distributed as dist
from tiny import HIDDEN, VOCAB, adamw, cross_entropy, mesh_of, rows
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import echelon as ec

MESH = {"dp": 1, "ep": 2}
FLOAT64 = False  # the mended form: in float64 see fsdp2_divides_twice.py
EXPERTS = 4


class Experts(nn.Module):
    """Top-1 experts; `w_EDD` holds those of this rank only where `ep` is more than one."""

    def __init__(self) -> None:
        """Make all experts."""
        super().__init__()
        self.w_EDD = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.1)

    def forward(self, x_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        """Return each token through its expert, counted from this rank's first."""
        w_EDD = self.w_EDD.to_local() if isinstance(self.w_EDD, DTensor) else self.w_EDD
        return torch.bmm(x_ND.unsqueeze(1), w_EDD[expert_N]).squeeze(1)


class Model(nn.Module):
    """Embedding, one layer of experts with a fixed router, head."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.experts = Experts()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.group: dist.ProcessGroup | None = None

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV; token t goes to expert t % 4."""
        x_ND, expert_N = self.embed(tokens_BT).flatten(0, 1), tokens_BT.flatten() % EXPERTS
        out_ND = self.experts(x_ND, expert_N) if self.group is None else self.routed(x_ND, expert_N)
        return self.head(x_ND + out_ND).unflatten(0, tokens_BT.shape)

    def routed(self, x_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        """Send every token to the rank of its expert, and back."""
        ranks = MESH["ep"]
        owner_N = expert_N // (EXPERTS // ranks)
        order_N = owner_N.argsort(stable=True)
        sent = owner_N.bincount(minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        expert_M = expert_N.new_empty(int(received.sum()))
        sizes = (received.tolist(), sent.tolist())
        dist.all_to_all_single(expert_M, expert_N[order_N], *sizes, group=self.group)
        x_MD = x_ND.new_empty(int(received.sum()), HIDDEN)
        x_MD = all_to_all_single(x_MD, x_ND[order_N], *sizes, group=self.group)
        out_MD = self.experts(x_MD, expert_M % (EXPERTS // ranks))
        back_ND = all_to_all_single(torch.empty_like(x_ND), out_MD, *sizes[::-1], group=self.group)
        return back_ND[order_N.argsort()]


def model_of(case: ec.VerifyCase) -> Model:
    """Return the model with the same initial values everywhere."""
    torch.manual_seed(case.seed)
    return Model().to(case.dtype)


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train all experts on one device."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(step, 0, 1)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=adamw(model))


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Shard the experts over their data ranks, the rest over all."""
    return train(case, divide_by_all=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Tell FSDP2 how many ranks brought tokens."""
    return train(case, divide_by_all=True)


def train(case: ec.VerifyCase, divide_by_all: bool) -> ec.OnRank:
    """Return this rank: experts split over `ep`, everything sharded by FSDP2."""
    mesh = mesh_of(case, MESH)
    model = model_of(case)
    model.group = mesh.get_group("ep")
    experts = model.experts
    experts.w_EDD = nn.Parameter(distribute_tensor(experts.w_EDD.data, mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh._flatten("all"))
    if divide_by_all:
        experts.set_gradient_divide_factor(float(case.world_size))
    optimizer = adamw(model)

    def step(number: int) -> torch.Tensor:
        inputs_BT, labels_BT = rows(number, case.rank, case.world_size)
        loss = cross_entropy(model(inputs_BT), labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
