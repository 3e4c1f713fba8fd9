"""1F1B over two stages, DDP over two replicas, clipped by the norm over all stages."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

MESH = {"pp": 2, "dp": 2}
MICROBATCHES = 4
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

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this rank's stage on the rows of its replica."""
    mesh = init_device_mesh(case.device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    count = MESH["pp"]
    layers = model_of(case)
    per_stage = len(layers) // count
    stages, models = [], []
    for index in [case.mesh["pp"]]:
        # Names stay those of the whole model: a stage is a part of it under the same numbers.
        part = nn.Sequential()
        for number in range(index * per_stage, (index + 1) * per_stage):
            part.add_module(str(number), layers[number])
        module = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        rows = 8 // MESH["dp"] // MICROBATCHES
        ids = torch.zeros(rows, 10, dtype=torch.int64)
        stream, logits = (
            torch.zeros(rows, 10, width, dtype=case.dtype, requires_grad=True)
            for width in (HIDDEN, VOCAB)
        )
        stages.append(
            PipelineStage(
                module,
                index,
                count,
                case.device,
                input_args=ids if index == 0 else stream,
                output_args=logits if index == count - 1 else stream,
                group=mesh.get_group("pp"),
            )
        )
        models.append(module)
    labels = torch.ones(())
    schedule = Schedule1F1B(
        stages[0],
        MICROBATCHES,
        loss_fn=lambda logits_BTV, labels_BT: summed_loss(logits_BTV, labels_BT) / labels,
        scale_grads=False,
    )
    parameters = [weight for model in models for weight in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(number: int) -> dict[str, torch.Tensor | None]:
        whole_BT = batch(number)[1]
        # DDP takes the mean over the replicas, and the schedule the sum over microbatches.
        labels.fill_((whole_BT != IGNORED).sum() / MESH["dp"])
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        losses: list[torch.Tensor] = []
        schedule.step(inputs_BT, target=labels_BT, losses=losses)
        norm = nn.utils.get_total_norm([weight.grad for weight in parameters]) ** 2
        dist.all_reduce(norm, group=mesh.get_group("pp"))
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).sum() if losses else None, "grad_norm": norm.sqrt()}

    return ec.OnRank(models=models, step=step, optimizer=optimizer)
