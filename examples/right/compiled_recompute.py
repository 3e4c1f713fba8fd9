"""DDP with layers that are compiled, recomputed and have dropout: masks belong to the sample.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE`.
Each mask is drawn for the whole batch; a rank takes that of its rows. An average of the weights
follows training.
"""

import torch
import torch.distributed as dist
from ddp import HIDDEN, IGNORED, MESH, VOCAB, Block, batch, summed_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import echelon as ec

CLIP_NORM, DROPPED = 0.5, 0.25


class Dropping(nn.Module):
    """A block behind a dropout whose mask is a function of step, layer and row."""

    def __init__(self, number: int) -> None:
        """Make the block; `number` is the layer's."""
        super().__init__()
        self.number, self.step, self.rows = number, 0, slice(0, 8)
        self.block = Block()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Drop some of what the block adds."""
        made = torch.Generator().manual_seed(1000 * self.step + self.number)
        drawn = torch.rand(8, *x_BTD.shape[1:], generator=made)[self.rows]
        added = self.block(x_BTD) - x_BTD
        return x_BTD + added * (drawn >= DROPPED) / (1 - DROPPED)


class Decoder(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, recompute: bool = False) -> None:
        """Make the layers; with `recompute` backward runs blocks again."""
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Dropping(number) for number in range(3))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV."""
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = (
                checkpoint(block, x_BTD, use_reentrant=False) if self.recompute else block(x_BTD)
            )
        return self.head(x_BTD)

    def at(self, step: int, rows: slice = slice(0, 8)) -> None:
        """Set the step, and the rows of the batch that come next."""
        for block in self.blocks:
            block.step, block.rows = step, rows


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch."""
    torch.manual_seed(case.seed)
    model = Decoder().to(case.dtype)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        model.at(step)
        return summed_loss(model(inputs_BT), labels_BT) / (labels_BT != IGNORED).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this replica."""
    torch.manual_seed(case.seed)
    inner = Decoder(recompute=True).to(case.dtype)
    for block in inner.blocks:
        block.block.compile(backend="aot_eager")
    model = DistributedDataParallel(inner, static_graph=True, gradient_as_bucket_view=True)
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True
    )
    size = 8 // MESH["dp"]

    def step(number: int) -> dict[str, torch.Tensor]:
        rows = slice(case.mesh["dp"] * size, (case.mesh["dp"] + 1) * size)
        inputs_BT, labels_BT = (x[rows] for x in batch(number))
        labels = (labels_BT != IGNORED).sum()
        dist.all_reduce(labels)
        inner.at(number, rows)
        loss = summed_loss(model(inputs_BT), labels_BT) * MESH["dp"] / labels
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        average.update_parameters(inner)
        optimizer.zero_grad(set_to_none=False)
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
