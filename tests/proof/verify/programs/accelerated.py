"""Accelerate: prepared model and optimizer, gradients accumulated over two microbatches."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator
from net import adamw, batch, built, loss_of, one_device

import echelon as ec

MESH = {"dp": 2}
DTYPE = torch.float64
MICROBATCHES = 2
__all__ = ["one_device"]


def on_rank(case):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
    whole = built(case)
    model, optimizer = accelerator.prepare(whole, adamw(whole.parameters()))

    def step(number):
        total = 0.0
        mine = [rows.chunk(case.degrees["dp"])[case.mesh["dp"]] for rows in batch(number)]
        for ids, labels in zip(*(rows.chunk(MICROBATCHES) for rows in mine), strict=True):
            with accelerator.accumulate(model):
                loss = loss_of(model(ids), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() / MICROBATCHES
        return total

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
