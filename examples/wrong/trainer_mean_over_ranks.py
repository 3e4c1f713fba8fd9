"""The Trainer with `average_tokens_across_devices=False`: the mean of the replicas' means.

What you would have seen: a loss curve a little off that of the same batch on one device; tokens of
a replica with few labels weigh more than those of another.
Public issue: https://github.com/huggingface/transformers/issues/34242 (closed; the switch came in
October 2024, and was off until July 2025).
Cause: each replica divides by its own labels, DDP takes the mean of the replicas. It is so in
transformers 5.23 with the switch off.
Mended here: the switch as it is by default.
Needs transformers and accelerate (tried with 5.23 and 1.15).
"""

import sys
from pathlib import Path

import echelon as ec

sys.path.append(str(Path(__file__).resolve().parent.parent / "right"))

from hf_trainer import Told, one_device, trainer_of

MESH = {"dp": 2}

__all__ = ["one_device"]


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Switch the count of all replicas' labels off."""
    return train(case, average_tokens_across_devices=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Leave it on."""
    return train(case, average_tokens_across_devices=True)


def train(case: ec.VerifyCase, **changes: object) -> ec.OnRank:
    """Let the Trainer run all steps."""
    told = Told()
    trainer = trainer_of(case, told, **changes)

    def run() -> list[dict[str, float]]:
        trainer.train()
        return told.steps

    return ec.OnRank(model=trainer.model, run=run, optimizer=trainer.optimizer)
