"""Which settings of the optimizer, and of its learning rate, the kind that is chosen uses."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.refusals import no_effect
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.batch import LEARNING_RATE_FITS_STEPS
from echelon.core.rulebook.config import NO_EFFECT

USED_BY = {
    "beta1": ("adamw", "muon"),
    "beta2": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "newton_schulz_steps": ("muon",),
}
"""The kinds of optimizer that use a setting; muon updates by AdamW what is no matrix of a block."""


def optimizer_effects(view: View) -> Iterator[Problem]:
    """Yield settings of another kind of optimizer, or of a decay of nothing."""
    kind = view.word("optimizer.kind")
    for name, kinds in USED_BY.items():
        if kind not in kinds:
            works = [f'optimizer.kind = "{other}"' for other in kinds]
            yield from no_effect(view, f"optimizer.{name}", f'"{kind}" does not use it', works)
    if view.number("optimizer.weight_decay") == 0:
        why = "optimizer.weight_decay = 0 lets nothing decay"
        yield from no_effect(view, "optimizer.decay", why, ["optimizer.weight_decay = 0.1"])


def learning_rate_effects(view: View) -> Iterator[Problem]:
    """Yield parts of the learning-rate schedule that its kind does not have."""
    kind, decay = view.word("optimizer.schedule"), view.integer("optimizer.decay_steps")
    if kind != "wsd":
        why = f'"{kind}" has no separate decay; it belongs to "wsd"'
        yield from no_effect(view, "optimizer.decay_steps", why, ['schedule = "wsd"'])
    elif decay == 0:
        yield NO_EFFECT.problem(
            'optimizer.schedule = "wsd" with decay_steps = 0 never falls: it is "constant"',
            key="optimizer.schedule",
            set_by=view.set_by("optimizer.schedule", "optimizer.decay_steps"),
            works=('schedule = "constant"', "decay_steps = 100"),
        )
    if kind == "constant":
        why = "a constant learning rate ends where it is"
        yield from no_effect(view, "optimizer.final_ratio", why, ['schedule = "cosine"'])


def learning_rate_fits_steps(view: View) -> Iterator[Problem]:
    """Check that warm-up and decay fit into the run."""
    steps, warmup = view.integer("train.steps"), view.integer("optimizer.warmup_steps")
    decay = view.integer("optimizer.decay_steps")
    if warmup + decay > steps:
        yield LEARNING_RATE_FITS_STEPS.problem(
            f"optimizer.warmup_steps + decay_steps = {warmup} + {decay} = {warmup + decay}, but "
            f"train.steps = {steps}",
            key="optimizer.warmup_steps",
            set_by=view.set_by("optimizer.warmup_steps", "optimizer.decay_steps", "train.steps"),
            works=(
                f"train.steps = {warmup + decay}",
                *([f"optimizer.warmup_steps = {steps - decay}"] if decay <= steps else []),
            ),
        )
