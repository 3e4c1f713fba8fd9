"""Plain torch in one process: what the limits of every mode are computed from."""

from __future__ import annotations

from bench.harness.data import global_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, llama


def build(settings: Settings) -> StepFunction:
    """Return the step of one process that holds the whole model and batch."""
    model = llama(settings)
    optimizer = adamw(settings, model.parameters())

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = global_batch(settings, number)
        loss = cross_entropy(model(input_ids=inputs).logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
