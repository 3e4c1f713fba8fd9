"""Your own module in your own loop, under ZeRO: `ec.parallelize`.

    torchrun --nproc-per-node 2 examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py zero.stage=1

Nothing here knows how the parameters are split: the stage, the mesh, precision and optimizer are
those of the plan, and the losses are the same whatever it says.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import echelon as ec

STEPS, ROWS, WIDTH = 5, 8, 16


class Residual(nn.Module):
    """One block of a small network."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the layers make of it."""
        return x + self.narrow(torch.relu(self.wide(x)))


def main(settings: list[str]) -> None:
    """Train on as many ranks as there are."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4)))

    zero = settings or ["zero.stage=3"]
    whole = "zero.stage=0" in zero
    mesh = f"mesh.dp_replicate={ranks}" if whole else f"mesh.dp_shard={ranks}"
    plan = ec.plan("nano", settings=[mesh, "optimizer.learning_rate=1e-3", *zero])
    model, optimizer = ec.parallelize(model, plan)

    for step in range(STEPS):
        # The rows of all ranks are one batch; each rank takes its own.
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(ROWS, WIDTH, generator=generator).chunk(ranks)[rank]
        loss = nn.functional.mse_loss(model(rows), rows.roll(1, dims=1))
        optimizer.scale(loss).backward()
        report = optimizer.step()
        if rank == 0:
            print(f"step {step}  grad_norm {report.grad_norm:.4f}")

    if rank == 0:
        for unit in optimizer.units():
            print(f"unit {unit.name:6}  {unit.bytes} bytes")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
