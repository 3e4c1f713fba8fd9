# SPDX-License-Identifier: Apache-2.0
"""Settings of a run that a search takes: defaults, the algorithm of sums, and refused ones.

The batch and the dtypes have defaults that suit the devices. Settings by which another number of
ranks is another training are refused (`require_one_training`).

`collectives.algorithm`: one rank sums nothing, and neither do the plans of a search whose ranks
share nothing, or for a tree slices alone: there the setting has no effect, and is left out. Every
other plan has it, and rules say of each whether the algorithm fits its groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echelon.config.automatic import default_precision
from echelon.config.cluster.settings import read_cluster
from echelon.config.derived.replicas import ALGORITHM_KEY, COUNT_KEY, EVERY_KEY, UPDATES_KEY
from echelon.config.entries import DEFAULT, Entry
from echelon.config.job import Job, assumed_batch
from echelon.config.load import resolve, say_adapted
from echelon.config.model.settings import derive_model, expand_model
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.setting_layers import SettingLayers
from echelon.config.view import View
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.mesh import OWN_SUMS_NEED_GLOO
from echelon.core.rulebook.planner import SEARCH_SPLITS_ONE_TRAINING
from echelon.core.settings.value_types import toml_text
from echelon.cost.seconds.trainers import OURS
from echelon.interop.tools import abilities_of_trainer

Layers = Sequence[Mapping[str, Entry]]


def algorithm_asked_for(layers: Layers) -> Entry | None:
    """Return the algorithm that a run names, None where it is left to us."""
    found = [layer[ALGORITHM_KEY] for layer in layers if ALGORITHM_KEY in layer]
    return found[-1] if found and found[-1].value != "auto" else None


def resolve_one_rank(gathered: SettingLayers, name: str, trainer: str) -> Plan:
    """Return the run on one rank; ConfigError where no plan can sum as it says."""
    asked = algorithm_asked_for(gathered.layers)
    job = resolve(_left_out(gathered), name, None)
    say_adapted(job)
    plan = job.plan
    if asked is None or asked.value == BACKEND:
        return plan
    where, said = asked.source, f'{ALGORITHM_KEY} = "{asked.value}"'
    if trainer != OURS:
        raise ConfigError(
            NO_EFFECT.problem(
                f"{said} changes nothing: it is of our own trainer, and the seconds are those of "
                f"{trainer}",
                key=ALGORITHM_KEY,
                set_by=where,
                suggestions=[f"--trainer {OURS}", f'{ALGORITHM_KEY} = "auto"'],
            )
        )
    if plan.cluster.backend == "nccl":
        raise ConfigError(
            OWN_SUMS_NEED_GLOO.problem(
                f"{said}, but {plan.cluster.name} communicates over NCCL",
                key=ALGORITHM_KEY,
                set_by=where,
                suggestions=[f'{ALGORITHM_KEY} = "{BACKEND}"'],
            )
        )
    return plan


def resolve_candidate(gathered: SettingLayers, name: str) -> Job:
    """Return the Job of a plan of a search; ConfigError where it breaks a rule."""
    try:
        return resolve(gathered, name, None)
    except ConfigError as error:
        if {(one.rule, one.key) for one in error.problems} != {(NO_EFFECT.id, ALGORITHM_KEY)}:
            raise
        return resolve(_left_out(gathered), name, None)


def _left_out(gathered: SettingLayers) -> SettingLayers:
    layers = [{k: v for k, v in one.items() if k != ALGORITHM_KEY} for one in gathered.layers]
    return SettingLayers(
        layers=[*layers], problems=gathered.problems, incomplete=gathered.incomplete
    )


TOKENS_OF_A_BATCH = 4 * 2**20
"""Tokens of a global batch by default."""
_LONGEST_SEQUENCE = 8192
"""Tokens of a sequence by default, if the model has the positions."""


def complete_run(gathered: SettingLayers, model: str, trainer: str) -> Iterator[str]:
    """Put defaults under the layers of a run, and yield each as text."""
    merged = gathered.merged()
    if gathered.incomplete or gathered.problems:
        raise ConfigError(gathered.problems)
    expanded, problems = expand_model(merged)
    if problems:
        raise ConfigError(problems)
    if not any(key.startswith("model.") for key in merged):
        return
    expanded = dict(expanded) | dict(derive_model(View(entries=expanded), model))
    view = View(entries=expanded)
    found: dict[str, object] = {}
    yield from assumed_batch({key: entry.source for key, entry in merged.items()})
    if not view.has("batch.sequence_length") and view.has("model.max_positions"):
        length = min(_LONGEST_SEQUENCE, view.integer("model.max_positions"))
        found["batch.sequence_length"] = length
        yield f"sequences of {length:,} tokens"
    if not view.has("batch.global_sequences"):
        length = found.get("batch.sequence_length") or view.integer("batch.sequence_length")
        assert isinstance(length, int)
        count = max(1, TOKENS_OF_A_BATCH // length)
        found["batch.global_sequences"] = count
        yield f"a global batch of {count:,} sequences ({count * length:,} tokens)"
    if not any(key.startswith("precision.") for key in merged):
        precision, text = _precision(view)
        found |= precision
        yield text
    able = abilities_of_trainer(trainer)
    fixed = {} if able is None else dict(able.settings)
    if able is not None and able.reduces_in_parameter_dtype and "precision.parameters" in found:
        fixed["precision.reduction"] = found["precision.parameters"]
    # What a trainer has no choice of.
    for key, value in fixed.items():
        if key not in expanded:
            found[key] = value
            yield f"{key} = {value}, as {trainer} has it"
    if found:
        gathered.layers.insert(0, {k: Entry(value=v, source=DEFAULT) for k, v in found.items()})


def _precision(view: View) -> tuple[dict[str, object], str]:
    """Return the dtypes that suit the devices, and their text."""
    cluster = read_cluster(view) if any(map(view.has, CLUSTER_SOURCES)) else None
    if isinstance(cluster, Cluster):
        return default_precision(view, cluster)
    return {}, "everything in fp32"


LEFT_ALONE: Mapping[str, tuple[object, str]] = {
    EVERY_KEY: (0, "a search chooses mesh.dp_replicate"),
    COUNT_KEY: (0, "servers and their workers are not searched"),
    UPDATES_KEY: ("synchronous", "a search chooses how many workers are late"),
}
"""Each with the value that a search takes, and why no other."""


def require_one_training(settings: Mapping[str, Entry]) -> None:
    """Raise ConfigError with every setting of a run that a search cannot keep and choose around."""
    problems = [
        SEARCH_SPLITS_ONE_TRAINING.problem(
            f"{key} = {toml_text(entry.value)}, and {why}",
            key=key,
            set_by=entry.source,
            suggestions=(
                f"{key} = {toml_text(value)}",
                "a run with a mesh, without --cluster and --search",
            ),
        )
        for key, (value, why) in LEFT_ALONE.items()
        if (entry := settings.get(key)) is not None and entry.value != value
    ]
    if problems:
        raise ConfigError(problems)
