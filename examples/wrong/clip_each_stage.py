"""Clipping inside a pipeline: each stage clips by the norm of its own layers.

What you would have seen: the right loss until the first clipped step, a gradient norm in the log
that is one stage's only, and stages that learn at different rates ever after.
Public issue: https://github.com/pytorch/torchtitan/issues/596 (closed, mended by
https://github.com/pytorch/torchtitan/pull/649).
Cause: `torch.nn.utils.clip_grad_norm_` knows the parameters that it is given; those of a stage are
a part of the model, and no placement says so. It is so in torch 2.13.
Mended here: squares are summed over the stages, then all clip by the one norm.
"""

import torch
import torch.distributed as dist
from tiny import RATE, batch, cross_entropy, decoder, mesh_of
from tiny_pipeline import MICROBATCHES, build_stages, run_schedule
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import echelon as ec

MESH = {"pp": 2}
CLIP_NORM = 0.5


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device, clipped by the norm of all gradients."""
    model = decoder(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        return cross_entropy(model(inputs_BT), labels_BT)

    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Clip each stage alone."""
    return train(case, over_stages=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Clip by the norm over all stages."""
    return train(case, over_stages=True)


def train(case: ec.VerifyCase, over_stages: bool) -> ec.OnRank:
    """Return this stage."""
    mesh = mesh_of(case, MESH)
    stages, models = build_stages(case, mesh, [case.mesh["pp"]])
    schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=cross_entropy)
    parameters = list(models[0].parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)

    def step(number: int) -> dict[str, torch.Tensor | None]:
        loss = run_schedule(schedule, number, 0, 1)
        if over_stages:
            norm = get_total_norm([weight.grad for weight in parameters]) ** 2
            dist.all_reduce(norm, group=mesh.get_group("pp"))
            norm = norm.sqrt()
            clip_grads_with_norm_(parameters, CLIP_NORM, norm)
        else:
            norm = clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(models=models, step=step, optimizer=optimizer)
