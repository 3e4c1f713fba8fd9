# SPDX-License-Identifier: Apache-2.0
"""Whose checkpoint it is: a run may be resumed with the same mathematics and tokenizer only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, cast

from echelon.config.job import DataSettings
from echelon.core.errors import Problem
from echelon.core.messages.removed_settings import REMOVED_SETTINGS
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Mathematics, Plan
from echelon.core.rulebook.run import (
    CHECKPOINT_SAME_MATHEMATICS,
    CHECKPOINT_SAME_MODEL,
    CHECKPOINT_SAME_TOKENIZER,
    RESUME_SAME_DATA,
)
from echelon.core.serialize import content_hash, to_json
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex, TensorEntry

NAMES_SHOWN = 4  # names in a message
NOT_COMPARED = frozenset(
    {
        "model.name",
        *(setting.entry.removeprefix("mathematics.") for setting in REMOVED_SETTINGS.values()),
        *("local_sgd.min_islands", "local_sgd.restarts"),
    }
)
"""Entries of the mathematics that are labels: two models of one shape are the same model. What
becomes of a lost island is no mathematics of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Say what a checkpoint belongs to: the plan's mathematics and the hash of the tokenizer."""

    mathematics: Mathematics
    plan_hash: str
    tokenizer_hash: str

    @classmethod
    def from_plan(cls, plan: Plan, tokenizer_hash: str) -> RunIdentity:
        """Return the identity of runs of `plan` on ids of the tokenizer with this hash."""
        return cls(
            mathematics=plan.mathematics,
            plan_hash=plan.content_hash(),
            tokenizer_hash=tokenizer_hash,
        )

    @property
    def model_hash(self) -> str:
        """Return 16 hex digits of the model's shape, whatever it is called."""
        return content_hash({**to_json(self.mathematics.model), "name": ""})


def identity_problems(
    index: CheckpointIndex, identity: RunIdentity, *, where: str, accept: Collection[str]
) -> Iterator[Problem]:
    """Yield what keeps the checkpoint `where` from being this run's.

    `accept` lists entries of the mathematics (such as ``optimizer.total_steps``) that the caller
    means to change.
    """
    # What an older version did not have, and so did not write, was what it is by default.
    unwritten = {**_defaults(Mathematics), "model": _defaults(ModelShape)}
    saved = dict(_flat(unwritten)) | dict(_flat(index.mathematics))
    wanted = dict(_flat(to_json(identity.mathematics)))
    other = [
        key
        for key in sorted(set(saved) | set(wanted))
        if key not in NOT_COMPARED and saved.get(key) != wanted.get(key)
    ]
    tensors = _other_tensors(index, identity)
    if tensors:
        yield CHECKPOINT_SAME_MODEL.problem(
            f"{where} is of another model: {shown(tensors)}",
            key="model",
            suggestions=_own_run(where),
        )
    if index.tokenizer_hash != identity.tokenizer_hash:
        yield CHECKPOINT_SAME_TOKENIZER.problem(
            f"{where} was trained on tokenizer {index.tokenizer_hash}, "
            f"and this run reads tokenizer {identity.tokenizer_hash}",
            key="data.tokenizer",
        )
    # The model's own entries are already said by name of tensor, where tensors differ.
    other = [key for key in other if not (tensors and key.startswith("model."))]
    changed = [key for key in other if key not in accept]
    if changed:
        differences = [f"{key} was {saved.get(key)!r}, is {wanted.get(key)!r}" for key in changed]
        yield CHECKPOINT_SAME_MATHEMATICS.problem(
            f"{where} continues other mathematics: {shown(differences)}",
            key=changed[0],
            suggestions=_own_run(where),
        )


def _own_run(where: str) -> tuple[str, ...]:
    """Return the command that goes on with the run of a checkpoint as it was."""
    run = Path(where).parent.parent
    file = run / "run.toml"
    return (f"echelon train {file} --resume {run}",) if file.is_file() else ()


def data_problems(
    state: Mapping[str, object], data_hash: str, data: DataSettings, *, where: str
) -> Iterator[Problem]:
    """Yield the problem of data that is not what the checkpoint `where` was trained on.

    Or that is read in another order (where an epoch ends, all steps that follow read other
    samples), or of which other tokens count.
    """
    if state.get("data_hash") != data_hash:
        yield RESUME_SAME_DATA.problem(
            f"{where} was trained on data {state.get('data_hash')}, this run reads data "
            f"{data_hash}",
            key="data.source",
        )
    settings = (
        ("epoch_end", "continue", data.epoch_end),
        ("train_on", "all", data.train_on),
    )
    for name, before_it_was, wanted in settings:
        if (known := state.get(name, before_it_was)) != wanted:
            yield RESUME_SAME_DATA.problem(
                f"{where} was trained with data.{name} = {known}, this run has {wanted}",
                key=f"data.{name}",
                suggestions=[f"data.{name} = {known}"],
            )


def shown(items: list[str]) -> str:
    """Return the first few of `items` and how many more there are."""
    more = len(items) - NAMES_SHOWN
    return "; ".join(items[:NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _other_tensors(index: CheckpointIndex, identity: RunIdentity) -> list[str]:
    saved: Mapping[str, TensorEntry] = index.tensors.get(PARAMETERS, {})
    wanted = {spec.name: spec.shape for spec in parameters(identity.mathematics.model)}
    differences: list[str] = []
    for name, shape in wanted.items():
        if name not in saved:
            differences.append(f"{name} {list(shape)} is not in it")
        elif saved[name].shape != shape:
            differences.append(f"{name} is {list(saved[name].shape)} in it, {list(shape)} here")
    return differences + [f"{name} is not in this model" for name in saved if name not in wanted]


def _defaults(kind: type[Mathematics | ModelShape]) -> dict[str, object]:
    values: dict[str, object] = {}
    for entry in fields(kind):
        if entry.default is not MISSING:
            values[entry.name] = to_json(entry.default)
        elif entry.default_factory is not MISSING:
            values[entry.name] = to_json(entry.default_factory())
    return values


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
