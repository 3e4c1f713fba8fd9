"""A 1F1B pipeline by hand over two replicas: sends and receives, one microbatch forward, one back.

A template: replace model, batch and step by your own, then `echelon prove --subject FILE --late`.
Activations wait in a queue for their backward; replicas are reduced once, after the last one.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from ddp import CLIP_NORM, HIDDEN, IGNORED, batch, model_of, one_device, summed_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import echelon as ec

__all__ = ["one_device"]

MESH = {"pp": 2, "dp": 2}
MICROBATCHES = 4


class Stage:
    """The layers of this rank, and the microbatches that are between its two passes."""

    def __init__(self, layers: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
        """Take the layers; `mesh` has pp and dp."""
        self.layers, self.dtype = layers, dtype
        self.group, self.index = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.num_stages = self.group.size()
        self.waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.sends: list[tuple[Any, torch.Tensor]] = []
        self.losses: list[torch.Tensor] = []

    def receive(self, like: torch.Tensor, stage: int) -> torch.Tensor:
        """Wait for a stream of another stage."""
        x_BTD = torch.empty(*like.shape, HIDDEN, dtype=self.dtype)
        handle: Any = dist.irecv(x_BTD, group=self.group, group_src=stage)
        handle.wait()
        return x_BTD

    def send(self, x_BTD: torch.Tensor, stage: int) -> None:
        """Send without waiting; the tensor is held until it has gone."""
        x_BTD = x_BTD.detach().contiguous()
        self.sends.append((dist.isend(x_BTD, group=self.group, group_dst=stage), x_BTD))

    def forward(self, x_BT: torch.Tensor, y_BT: torch.Tensor, labels: torch.Tensor) -> None:
        """Take a microbatch through the layers."""
        x = x_BT if self.index == 0 else self.receive(x_BT, self.index - 1).requires_grad_()
        out = self.layers(x)
        if self.index == self.num_stages - 1:
            out = summed_loss(out, y_BT) / labels
            self.losses.append(out.detach())
        else:
            self.send(out, self.index + 1)
        self.waiting.append((x, out))

    def backward(self) -> None:
        """Take the oldest microbatch back."""
        x, out = self.waiting.popleft()
        last = self.index == self.num_stages - 1
        out.backward(None if last else self.receive(out[..., 0], self.index + 1))
        if self.index > 0:
            assert x.grad is not None
            self.send(x.grad, self.index - 1)

    def run(self, inputs_BT: torch.Tensor, labels_BT: torch.Tensor, labels: torch.Tensor) -> None:
        """Warm up, then one forward and one backward in turn, then what is left."""
        parts = zip(inputs_BT.chunk(MICROBATCHES), labels_BT.chunk(MICROBATCHES), strict=True)
        for number, (x_BT, y_BT) in enumerate(parts):
            self.forward(x_BT, y_BT, labels)
            if number >= self.num_stages - 1 - self.index:
                self.backward()
        while self.waiting:
            self.backward()
        for handle, _ in self.sends:
            handle.wait()
        self.sends.clear()


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this rank's stage on the rows of its replica."""
    mesh = init_device_mesh(case.device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    replicas = mesh.get_group("dp")
    whole = model_of(case)
    size = len(whole) // MESH["pp"]
    layers = nn.Sequential()
    for index in range(case.mesh["pp"] * size, (case.mesh["pp"] + 1) * size):
        layers.add_module(str(index), whole[index])
    stage = Stage(layers, mesh, case.dtype)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, foreach=True)

    def step(number: int) -> dict[str, torch.Tensor | None]:
        inputs_BT, labels_BT = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        labels = (batch(number)[1] != IGNORED).sum()
        stage.run(inputs_BT, labels_BT, labels)
        grads = [p.grad for p in layers.parameters() if p.grad is not None]
        for grad in grads:
            dist.all_reduce(grad, group=replicas)
        norm = nn.utils.get_total_norm(grads) ** 2
        dist.all_reduce(norm, group=mesh.get_group("pp"))
        nn.utils.clip_grads_with_norm_(layers.parameters(), CLIP_NORM, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss = None
        if stage.losses:
            loss = torch.stack(stage.losses).sum()
            dist.all_reduce(loss, group=replicas)
            stage.losses.clear()
        return {"loss": loss, "grad_norm": norm.sqrt()}

    return ec.OnRank(model=layers, step=step, optimizer=optimizer)
