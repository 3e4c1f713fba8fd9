"""Random layouts of tiny runs, as settings of a run file, and optimizers that both sides have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.schedule.build import SCHEDULES

LENGTH = 16  # tokens of a sequence
WORLDS = (2, 2, 2, 4, 4, 4, 8)
"""Ranks, drawn as often as they are named."""
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def draw_layout(random: Random, *, experts: bool, worlds: Sequence[int] = WORLDS) -> list[str]:
    """Return how a run is split, for rules to refuse where a model can't be."""
    mesh = dict.fromkeys(_AXES, 1)
    left = random.choice(worlds)
    while left > 1:
        mesh[random.choice(_AXES)] *= 2
        left //= 2
    found: dict[str, object] = {f"mesh.{axis}": n for axis, n in mesh.items() if n > 1}
    if mesh["tp"] > 1 and random.random() < 0.5:
        found["mesh.sequence_parallel"] = True
    if mesh["cp"] > 1:
        found["context.kind"] = random.choice(tuple(CONTEXT_KINDS))
    if mesh["pp"] > 1:
        found |= _pipeline(random)
    if mesh["dp_shard"] > 1:
        found["zero.stage"] = random.choice((1, 2, 3, 3))
    elif mesh["cp"] > 1:
        found["zero.stage"] = random.choice((0, 1, 3))
    if experts and mesh["dp_shard"] * mesh["cp"] > 1 and random.random() < 0.7:
        found["mesh.ep"] = 2
    if random.random() < 0.2:
        found["recompute.policy"] = random.choice(("full", "selective"))
    size = random.choice((1, 1, 2))
    count = mesh["pp"] * random.choice((1, 2))
    found |= {
        "batch.microbatch_sequences": size,
        "batch.global_sequences": size * count * mesh["dp_replicate"] * mesh["dp_shard"],
    }
    return [f"{key}={_text(value)}" for key, value in found.items()]


def _pipeline(random: Random) -> dict[str, object]:
    schedule = random.choice(("1f1b", "1f1b", *SCHEDULES))
    found: dict[str, object] = {"pipeline.schedule": schedule}
    if SCHEDULES[schedule].default_virtual_stages > 1:
        found["pipeline.virtual_stages"] = 2
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Hold what both sides update weights by.

    Adam divides a gradient g by |g| + eps: what rounding changes of a gradient is multiplied by
    rate / eps at most. With the usual eps of 1e-8 a gradient that is rounding alone moves a weight
    as far as any other does, and no tolerance tells right from wrong: so it is larger here.
    """

    kind: str
    """`optimizer.kind`: adamw or sgd."""
    rate: float
    """Of every step."""
    decay: float
    """Weight decay."""
    decay_of: str
    """`optimizer.decay`: what takes it, matrices or all."""
    clip: float | None
    """The longest gradient; None: of any length."""
    momentum: float = 0.0
    """Of SGD."""
    eps: float = 1e-3
    """Of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""

    @property
    def settings(self) -> list[str]:
        """Return them as settings of a run."""
        own = [f"optimizer.momentum={self.momentum}"]
        if self.kind == "adamw":
            own = [f"optimizer.eps={self.eps}"]
            own += [f"optimizer.beta{n}={beta}" for n, beta in enumerate(self.betas, start=1)]
        return [
            f"optimizer.kind={self.kind}",
            f"optimizer.learning_rate={self.rate}",
            "optimizer.schedule=constant",
            "optimizer.warmup_steps=0",
            f"optimizer.weight_decay={self.decay}",
            f"optimizer.decay={self.decay_of}",
            f"optimizer.clip_norm={'none' if self.clip is None else self.clip}",
            *own,
        ]

    @property
    def gain(self) -> float:
        """Return how far an error of 1 in the gradient of one step may move a weight by it."""
        return self.rate / (self.eps if self.kind == "adamw" else 1.0 - self.momentum)


ADAMW = Updates(kind="adamw", rate=1e-2, decay=0.1, decay_of="matrices", clip=1.0)


def draw_updates(random: Random) -> Updates:
    """Return an optimizer."""
    kind = random.choice(("adamw", "sgd"))
    decay = random.choice((0.0, 0.1))
    return Updates(
        kind=kind,
        rate=1e-2 if kind == "adamw" else 0.1,
        decay=decay,
        decay_of=random.choice(("matrices", "all")) if decay else "matrices",
        clip=random.choice((None, 0.5)),
        momentum=random.choice((0.0, 0.9)) if kind == "sgd" else 0.0,
    )
