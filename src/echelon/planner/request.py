"""What is asked of a search: a model, a cluster, a batch, and what is pinned.

A model is a preset, the path of a config.json, or a run file, whose layout is left aside. What
nobody says has a default, and every default that was taken is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from echelon.config.cluster import read_cluster
from echelon.config.entries import Entry
from echelon.config.gather import Gathered, gather, parse_sets
from echelon.config.job import Job
from echelon.config.kinds import toml_text
from echelon.config.load import run_name_of
from echelon.config.model import derive_model, expand_model
from echelon.config.resolve import resolve
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.view import View
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Mathematics, Plan
from echelon.core.rulebook.config import UNKNOWN_PRESET
from echelon.core.rulebook.planner import OBJECTIVE_NEEDS_PRICE, TRAINER_RUNS_PIN, UNKNOWN_TRAINER
from echelon.core.rules import did_you_mean
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.cost.lattice.of_plan import software_of
from echelon.cost.lattice.software import Software
from echelon.planner.estimate import OURS, on_devices
from echelon.planner.pins import Pins, pin_word, read_pins
from echelon.planner.trainers import ABILITIES, ALSO_CALLED

Objective = Literal["time", "throughput", "cost", "devices"]
"""A short step on all devices; many tokens a second and device, or for a price; few devices."""

TOKENS_OF_A_BATCH = 4 * 2**20
"""Tokens of a global batch where nobody says."""
LONGEST_SEQUENCE = 8192
"""Tokens of a sequence where nobody says, if the model has so many positions."""

LAYOUT_TABLES = ("mesh.", "zero.", "pipeline.", "recompute.", "context.")
LAYOUT_KEYS = (
    "batch.microbatch_sequences",
    "experts.expert_tp",
    "experts.zero_stage",
    "experts.dispatch",
    "experts.chunks",
    "experts.padded",
)
"""Settings that a search decides."""

NICKNAMES = {"llama3-405b": "llama3.1-405b"}
DEFAULT = "default of the search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Say what is wanted of plans, how many of them, and of which trainer the seconds are."""

    objective: Objective = "time"
    price: float | None = None
    top: int = 10
    trainer: str = OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Hold what a search is about; `alone` is the run on one rank, whose layout says nothing.

    `told` says what was taken where nobody said. Plans are made of `layers`, the settings of the
    run without its layout.
    """

    alone: Plan
    layers: tuple[Mapping[str, Entry], ...]
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    objective: Objective = "time"
    price: float | None = None
    top: int = 10
    trainer: str = OURS
    software: Software = field(default_factory=lambda: FRAMEWORKS[OURS])
    told: tuple[str, ...] = ()

    @property
    def model(self) -> ModelShape:
        """Return the shape of the model."""
        return self.alone.model

    @property
    def mathematics(self) -> Mathematics:
        """Return everything that can change the numbers of the run."""
        return self.alone.mathematics

    @property
    def memory_bytes(self) -> float:
        """Return the memory of a device."""
        return float(self.cluster.device.memory_bytes)

    def job(self, settings: Mapping[str, object]) -> Job:
        """Return the run with this layout, checked by every rule; ConfigError where one breaks."""
        gathered = Gathered(layers=[*self.layers])
        source = "the search"
        gathered.add({key: Entry(value=v, source=source) for key, v in settings.items()})
        return resolve(gathered, self.alone.name, None)


def make_request(
    model: str | Path,
    *,
    cluster: str | None = None,
    settings: Sequence[str] = (),
    pins: Sequence[str] = (),
    aim: Aim | None = None,
) -> Request:
    """Return what to search for; ConfigError with everything that is wrong.

    `cluster` is COUNTxDEVICE or a file; `settings` are "table.key=value", those of a layout pins.
    """
    layout = [text for text in settings if _is_layout(text.partition("=")[0].strip())]
    wanted = read_pins([*layout, *pins])
    aim = aim or Aim()
    aim = replace(aim, trainer=ALSO_CALLED.get(aim.trainer, aim.trainer))
    if aim.trainer not in FRAMEWORKS:
        raise ConfigError(_unknown_trainer(aim.trainer))
    if aim.objective == "cost" and aim.price is None:
        raise ConfigError(
            OBJECTIVE_NEEDS_PRICE.problem(
                "--objective cost needs the price of a device for an hour",
                set_by="--objective cost",
                works=("--price 2.5", "--objective throughput"),
            )
        )
    rest = [text for text in settings if text not in layout]
    gathered = _gathered(model, cluster, rest)
    told = tuple(_complete(gathered, str(model), aim.trainer))
    alone = resolve(gathered, run_name_of(model), None).plan
    mathematics = alone.mathematics
    wanted = _that_run(wanted, aim.trainer, experts=alone.model.experts is not None)
    return Request(
        alone=alone,
        layers=tuple(gathered.layers),
        cluster=alone.cluster,
        pins=wanted,
        objective=aim.objective,
        price=aim.price,
        top=aim.top,
        trainer=aim.trainer,
        software=on_devices(
            trainer_software(aim.trainer, mathematics), alone.cluster, trainer=aim.trainer
        ),
        told=told,
    )


def trainer_software(trainer: str, mathematics: Mathematics) -> Software:
    """Return the facts of a trainer with the dtypes of a run; other trainers keep their own sums.

    Ours takes the bytes of gradients and of their sums from the run; others have them fixed.
    """
    software = FRAMEWORKS[trainer]
    found = software_of(software, mathematics.precision, mathematics.optimizer.kind)
    return found if trainer == OURS else replace(software, element_bytes=found.element_bytes)


def on_cluster(request: Request, cluster: Cluster) -> Request:
    """Return the same request on other devices."""
    layer = {"cluster.preset": Entry(value=cluster.name, source="the search")}
    kept = tuple(_without(one, CLUSTER_SOURCES) for one in request.layers)
    alone = replace(request.alone, cluster=cluster)
    software = trainer_software(request.trainer, request.mathematics)
    facts = on_devices(software, cluster, trainer=request.trainer)
    return replace(request, cluster=cluster, alone=alone, layers=(*kept, layer), software=facts)


def _that_run(pins: Pins, trainer: str, *, experts: bool) -> Pins:
    """Return pins within what a trainer can run; ConfigError where it can run none of them."""
    able = ABILITIES.get(trainer)
    if able is None:
        return pins
    found = replace(pins, limits=able.limits(experts=experts))
    wrong = [name for name in pins.values if not found.of(name)]
    if wrong:
        raise ConfigError([_not_run(found, trainer, name) for name in wrong])
    return found


def _not_run(pins: Pins, trainer: str, name: str) -> Problem:
    text = pins.texts[name]
    return TRAINER_RUNS_PIN.problem(
        f"--pin {text}: {trainer} cannot run that",
        set_by=f"--pin {text}",
        works=(*(f"--pin {name}={pin_word(name, one)}" for one in pins.limits[name]),),
    )


def _unknown_trainer(trainer: str) -> Problem:
    names = tuple(sorted({*FRAMEWORKS, *ALSO_CALLED}))
    near = did_you_mean(trainer, names)
    return UNKNOWN_TRAINER.problem(
        f"--trainer {trainer}: there are no figures of that trainer",
        set_by=f"--trainer {trainer}",
        works=near or names,
    )


def _is_layout(key: str) -> bool:
    return key.startswith(LAYOUT_TABLES) or key in LAYOUT_KEYS


def _without(layer: Mapping[str, Entry], keys: Sequence[str]) -> dict[str, Entry]:
    return {key: entry for key, entry in layer.items() if key not in keys}


def _gathered(model: str | Path, cluster: str | None, settings: Sequence[str]) -> Gathered:
    """Return the layers of the run without its layout."""
    sets = [*settings]
    if cluster is not None:
        key = "file" if cluster.endswith(".toml") or "/" in cluster else "preset"
        sets.insert(0, f"cluster.{key}={toml_text(cluster)}")
    if is_hf_config(model):
        gathered = Gathered()
        entries, problems = parse_sets([f"model.hf_config={toml_text(str(model))}", *sets])
        gathered.problems.extend(problems)
        gathered.add(entries)
    else:
        gathered = gather(NICKNAMES.get(str(model), model), sets)
        gathered.problems[:] = [_or_config(one) for one in gathered.problems]
    if cluster is not None:
        # The run file's own cluster gives way to the one that is asked for.
        *below, last = gathered.layers or [{}]
        gathered.layers[:] = [*(_without(one, CLUSTER_SOURCES) for one in below), last]
    gathered.layers[:] = [
        {key: entry for key, entry in layer.items() if not _is_layout(key)}
        for layer in gathered.layers
    ]
    return gathered


def _or_config(problem: Problem) -> Problem:
    """Return the problem of a name that is none, with the other file that a model may stand in."""
    if problem.rule != UNKNOWN_PRESET.id or problem.key:
        return problem
    return replace(problem, works=(*problem.works, "a model's config.json"))


def is_hf_config(model: str | Path) -> bool:
    """Return whether a model is named by the path of a config.json, or of a folder with one."""
    path = Path(model)
    return str(model).endswith(".json") or (path.is_dir() and (path / "config.json").is_file())


def _complete(gathered: Gathered, model: str, trainer: str) -> Iterator[str]:
    """Put defaults under the layers of a run, and yield what they are."""
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
    if not view.has("batch.sequence_length") and view.has("model.max_positions"):
        length = min(LONGEST_SEQUENCE, view.integer("model.max_positions"))
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
    for key, value in _of_trainer(trainer, found).items():
        if key not in expanded:
            found[key] = value
            yield f"{key} = {value}, as {trainer} has it"
    if found:
        gathered.layers.insert(0, {k: Entry(value=v, source=DEFAULT) for k, v in found.items()})


def _of_trainer(trainer: str, found: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that a trainer has no choice of."""
    able = ABILITIES.get(trainer)
    if able is None:
        return {}
    sums = found.get("precision.parameters") if able.narrow_sums else None
    return {**able.numbers, **({} if sums is None else {"precision.reduction": sums})}


def _precision(view: View) -> tuple[dict[str, object], str]:
    """Return the dtypes that suit the devices: bf16 where they have it, else fp16, else fp32."""
    cluster = read_cluster(view) if any(map(view.has, CLUSTER_SOURCES)) else None
    if isinstance(cluster, Cluster):
        device = cluster.device
        if device.flops("bf16") is not None:
            return {"precision.parameters": "bf16"}, "parameters in bf16, the rest in fp32"
        if device.flops("fp16") is not None:
            half: dict[str, object] = {"precision.parameters": "fp16"}
            half["precision.loss_scaling"] = "dynamic"
            return half, f"parameters in fp16 ({device.name} has no bf16), the rest in fp32"
    return {}, "everything in fp32"
