"""Bugs planted in first values, batches, rates, groups and updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.models import counter_random
from echelon.proof.independent import comparison
from echelon.proof.oracle import optimizers, oracle
from echelon.training.data import batches as trainer_batches
from echelon.training.data import dataset
from echelon.training.optimizer import step as learning_rate
from tests.proof.independent.shared_bugs import Patch, changed, shared_bug


@shared_bug("weight decay", "embedding.weight", optimizer={"decay": "blocks"})
def embeddings_decay_too(patch: Patch) -> None:
    patch.setattr(optimizers, "decays", lambda optimizer, spec: len(spec.shape) > 1)


@shared_bug("weight decay", "layers.0.attention_norm.weight")
def norms_decay_too(patch: Patch) -> None:
    patch.setattr(optimizers, "decays", lambda optimizer, spec: True)


@shared_bug("initial values", "layers.0.attention.o.weight")
def residual_matrices_begin_as_wide_as_others(patch: Patch) -> None:
    right = counter_random.initial_values
    patch.setattr(
        oracle,
        "initial_values",
        lambda shape, spec, seed: right(
            shape, replace(spec, initial=spec.initial.replace("residual", "normal")), seed
        ),
    )


@shared_bug("initial values", "embedding.weight")
def initial_values_do_not_know_the_name(patch: Patch) -> None:
    right = counter_random.make_key
    patch.setattr(counter_random, "make_key", lambda *words: right(*words[:-1]))


@shared_bug("token batch", "batches of the trainer")
def samples_are_shifted_by_one_token(patch: Patch) -> None:
    right = dataset.TokenDataset.tokens
    patch.setattr(
        dataset.TokenDataset,
        "tokens",
        lambda self, start, stop: right(self, start + 1, stop + 1),
    )


@shared_bug("labels", "batches of the proof")
def labels_are_the_inputs(patch: Patch) -> None:
    for reader in (oracle, comparison):
        changed(
            patch, reader, "global_batch", lambda batch: replace(batch, labels_BT=batch.inputs_BT)
        )


@shared_bug("order of samples", "batches of the trainer")
def samples_come_in_order(patch: Patch) -> None:
    patch.setattr(
        trainer_batches,
        "sample_ids",
        lambda *, seed, step, num_samples, count, epoch_end: (
            np.arange(step * count, (step + 1) * count) % num_samples
        ),
    )


@shared_bug("document starts", "batches of the trainer", documents="separate")
def documents_start_at_their_end(patch: Patch) -> None:
    changed(
        patch,
        dataset,
        "document_starts",
        lambda found: tuple((0, *(t - 1 for t in starts[1:] if t > 1)) for starts in found),
    )


@shared_bug("learning rate", "learning rate of the oracle", optimizer={"schedule": "linear"})
def the_oracle_decays_twice_as_fast(patch: Patch) -> None:
    right = optimizers.learning_rate
    patch.setattr(
        oracle,
        "learning_rate",
        lambda settings, step: right(
            replace(settings, total_steps=(settings.total_steps + 1) // 2), step
        ),
    )


@shared_bug("learning rate", "learning rate of the trainer", optimizer={"schedule": "cosine"})
def the_trainer_begins_at_its_second_step(patch: Patch) -> None:
    right = learning_rate.learning_rate
    patch.setattr(learning_rate, "learning_rate", lambda settings, step: right(settings, step + 1))


@shared_bug("update of the optimizer", "embedding.weight")
def adamw_forgets_its_bias_correction(patch: Patch) -> None:
    patch.setattr(optimizers, "load_reference", lambda reference: _uncorrected)


def _uncorrected(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: optimizers.OptimizerState,
    optimizer: Any,
    *,
    rate: float,
    decay: float,
) -> optimizers.TensorUpdate:
    assert optimizer.kind in OPTIMIZERS
    state.num_updates = 10**6
    return optimizers.adamw(parameter, gradient, state, optimizer, rate=rate, decay=decay)


@shared_bug("update of the optimizer", "embedding.weight", optimizer={"kind": "muon"})
def muon_takes_every_matrix(patch: Patch) -> None:
    patch.setattr(
        optimizers,
        "update_rule_of",
        lambda optimizer, spec: "muon" if len(spec.shape) == 2 else "adamw",
    )


@shared_bug("gradient norm", "step 0")
def the_norm_is_a_sum_of_norms(patch: Patch) -> None:
    patch.setattr(
        oracle, "global_norm", lambda gradients: sum(float(g.norm()) for g in gradients.values())
    )


@shared_bug("update of the optimizer", "embedding.weight")
def a_clip_acts_twice(patch: Patch) -> None:
    changed(patch, oracle, "clip_scale", lambda scale: scale * scale)
