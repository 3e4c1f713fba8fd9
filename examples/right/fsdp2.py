"""FSDP2: blocks and root sharded, accumulated microbatches, clipped by the norm over all shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as fn

import echelon as ec

MESH = {"dp": 2}
MICROBATCHES = 2
VOCAB, HIDDEN, IGNORED = 48, 16, -100
CLIP_NORM = 0.5


class Block(nn.Module):
    """A feed-forward layer beside the stream."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        return x_BTD + self.down(fn.gelu(self.up(self.norm(x_BTD))))


def model_of(case: ec.VerifyCase) -> nn.Sequential:
    """Return the model with the initial values that every rank and one device share."""
    torch.manual_seed(case.seed)
    ends = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    return nn.Sequential(ends[0], *(Block() for _ in range(4)), ends[1]).to(case.dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs_BT and labels_BT of one step; sequences end at different tokens."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (8, 11), generator=made)
    inputs_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:].clone()
    for row in range(8):
        labels_BT[row, 3 + row % 7 :] = IGNORED
    return inputs_BT, labels_BT


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of the token losses."""
    return fn.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return summed_loss(model(inputs_BT), labels_BT) / (labels_BT != IGNORED).sum()

    def parts(step: int) -> list[tuple[torch.Tensor, int]]:
        # Told by themselves, a microbatch that is lost or weighs too much has a name.
        cut = [rows.chunk(MESH["dp"] * MICROBATCHES) for rows in batch(step)]
        return [
            (summed_loss(model(x_BT), y_BT), int((y_BT != IGNORED).sum()))
            for x_BT, y_BT in zip(*cut, strict=True)
        ]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ec.OneDevice(
        model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM, parts=parts
    )


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this rank's rows; weights, gradients and state are shards."""
    model = model_of(case)
    mesh = init_device_mesh(case.device.type, (MESH["dp"],))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> dict[str, torch.Tensor]:
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        labels = (labels_BT != IGNORED).sum()
        dist.all_reduce(labels)
        total = torch.zeros((), dtype=case.dtype)
        parts = zip(inputs_BT.chunk(MICROBATCHES), labels_BT.chunk(MICROBATCHES), strict=True)
        for index, (x_BT, y_BT) in enumerate(parts):
            model.set_requires_gradient_sync(index == MICROBATCHES - 1)
            # FSDP2 takes the mean over the ranks: times their number, it is a sum.
            loss = summed_loss(model(x_BT), y_BT) * MESH["dp"] / labels
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm.full_tensor()}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
