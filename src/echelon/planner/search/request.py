# SPDX-License-Identifier: Apache-2.0
"""What is asked of a search: a model, a cluster, a batch, and what is pinned.

A model is a preset, the path of a config.json, or a run file, whose layout is left aside. What
nobody says has a default, and every default that was taken is told.

A question about an answer is the same request on other devices, or with other settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from shlex import quote
from typing import Literal, get_args

from echelon.config.cluster.settings import typed_cluster
from echelon.config.entries import DEFAULT, Entry
from echelon.config.job import LENGTH_KEY, SEQUENCES_KEY, Job, assumed_batch
from echelon.config.load import run_name_of
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.setting_layers import (
    SettingLayers,
    gather_layers,
    parse_set_flags,
    preset_meant,
)
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, Problem
from echelon.core.messages.names import name_parts
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Mathematics, Plan
from echelon.core.rulebook.config import BAD_ARGUMENT, UNKNOWN_PRESET
from echelon.core.rulebook.planner import (
    OBJECTIVE_NEEDS_PRICE,
    TRAINER_RUNS_PIN,
    UNKNOWN_PIN,
    UNKNOWN_TRAINER,
)
from echelon.core.rules import did_you_mean
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import MachineNumbers
from echelon.cost.seconds.from_plan import constants_for_precision, machine_numbers_from_cluster
from echelon.cost.seconds.kernels import product_dtype, with_measured_kernels
from echelon.cost.seconds.trainers import (
    FRAMEWORKS,
    OURS,
    constants_of_trainer,
    constants_on_devices,
)
from echelon.interop.tools import ALSO_CALLED, abilities_of_trainer
from echelon.planner.search.pins import (
    SELECTIVE,
    Pins,
    limits_of_tool,
    pin_of_setting,
    pin_word,
    read_pins,
    recompute_of_pin,
)
from echelon.planner.search.run_settings import (
    TOKENS_OF_A_BATCH,
    complete_run,
    require_one_training,
    resolve_candidate,
    resolve_one_rank,
)

Objective = Literal["time", "throughput", "cost", "devices", "expected", "longest-sequence"]
"""A short step on all devices; many tokens a second and device, or for a price; few devices; a
short step of a long run, with its interruptions, restarts and the risk that a plan does not fit;
the longest sequence of which a plan fits, and its shortest step on all devices."""

LONGEST_SEQUENCE: Objective = "longest-sequence"

LAYOUT_TABLES = ("mesh.", "zero.", "pipeline.", "recompute.", "context.")
LAYOUT_KEYS = (
    *("batch.microbatch_sequences", "experts.expert_tp", "experts.zero_stage"),
    *("experts.dispatch", "experts.chunks", "experts.padded"),
)
"""Settings that a search decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAim:
    """Say what is wanted of plans, how many of them, and of which trainer the seconds are."""

    objective: Objective = "time"
    """What is best."""
    price: float | None = None
    """Price of a device hour; None where nobody said."""
    top: int = 10
    """Plans to return."""
    trainer: str = OURS
    """Whose constants are used."""

    @property
    def on_all_devices(self) -> bool:
        """True if a short step is wanted, for which plans take every device."""
        return self.objective in ("time", "expected", LONGEST_SEQUENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest(SearchAim):
    """Hold what a search is about, and what is wanted of its plans."""

    one_rank_run: Plan
    """The run on one rank, whose layout says nothing."""
    layers: tuple[Mapping[str, Entry], ...]
    """The settings of the run without its layout; plans are made of them."""
    cluster: Cluster
    """The devices to use."""
    pins: Pins = field(default_factory=Pins)
    """Choices that are not searched."""
    software: TrainerConstants = field(default_factory=lambda: FRAMEWORKS[OURS])
    """The constants of the trainer."""
    matmul_dtype: str | None = None
    """The dtype in which matrix products are computed, such as "fp8"; None: that of parameters."""
    uncounted_factor: float = 1.0
    """What bytes that are not counted are multiplied by before a plan is said to fit."""
    defaults_taken: tuple[str, ...] = ()
    """What was taken where nobody said."""

    @property
    def model(self) -> ModelShape:
        """Return the shape of the model."""
        return self.one_rank_run.model

    @property
    def mathematics(self) -> Mathematics:
        """Return everything that can change the numbers of the run."""
        return self.one_rank_run.mathematics

    @property
    def memory_bytes(self) -> float:
        """Return the memory of a device."""
        return float(self.cluster.device.memory_bytes)

    def machine_numbers(self, ranks: int) -> MachineNumbers:
        """Return the numbers of the devices with so many ranks, in the dtypes of the run."""
        half = self.mathematics.precision.parameters
        dtype = self.matmul_dtype or product_dtype(self.cluster, self.mathematics.precision)
        found = machine_numbers_from_cluster(self.cluster, dtype, attention_dtype=half, ranks=ranks)
        run, ours = self.one_rank_run, self.trainer == OURS
        return with_measured_kernels(found, run, dtype=dtype, ranks=ranks) if ours else found

    def with_memory(self, memory_bytes: float) -> SearchRequest:
        """Return the request on devices with so much memory."""
        device = replace(self.cluster.device, memory_bytes=int(memory_bytes))
        return replace(self, cluster=replace(self.cluster, device=device))

    def without_pins(self, *names: str) -> SearchRequest:
        """Return the request with its other pins only."""
        return replace(self, pins=self.pins.without(*names))

    def job(self, settings: Mapping[str, object]) -> Job:
        """Return the run with this layout, checked by every rule; ConfigError where one breaks."""
        gathered = SettingLayers(layers=[*self.layers])
        gathered.add(
            {
                key: Entry(value=value, source=self.pins.typed.get(pin_of_setting(key), ""))
                for key, value in settings.items()
            }
        )
        return resolve_candidate(gathered, self.one_rank_run.name)


def make_request(
    model: str | Path,
    *,
    cluster: str | None = None,
    settings: Sequence[str] = (),
    pins: Sequence[str] = (),
    aim: SearchAim | None = None,
) -> SearchRequest:
    """Return what to search for; ConfigError with everything that is wrong.

    `cluster` is COUNTxDEVICE or a file; `settings` are "table.key=value", those of a layout pins.
    """
    layout = [text for text in settings if _is_layout(text.partition("=")[0].strip())]
    wanted = read_pins(pins, settings=layout)
    aim = aim or SearchAim()
    typed = aim.trainer
    aim = replace(aim, trainer=trainer_meant(aim.trainer) or aim.trainer)
    if problems := [*_wrong_aims(aim)]:
        raise ConfigError(problems)
    rest = [text for text in settings if text not in layout]
    _require_open_length(aim, rest)
    gathered = _gathered(model, cluster, rest)
    require_one_training(gathered.merged())
    defaults_taken = tuple(complete_run(gathered, str(model), aim.trainer))
    alone = resolve_one_rank(gathered, run_name_of(model), aim.trainer)
    wanted = _pins_for_trainer(wanted, aim.trainer, typed, experts=alone.model.experts is not None)
    request = SearchRequest(
        one_rank_run=alone,
        layers=tuple(gathered.layers),
        cluster=alone.cluster,
        pins=wanted,
        software=trainer_software(aim.trainer, alone),
        defaults_taken=(*alone.model.assumed, *defaults_taken),
        **asdict(aim),
    )
    _require_recompute(request)
    return request


def _require_recompute(request: SearchRequest) -> None:
    """Refuse pinned recompute that the model cannot have: a rule says why."""
    for value in request.pins.values.get("recompute", ()):
        if value == SELECTIVE:
            continue
        every, operators = recompute_of_pin(value)
        layers, typed = request.model.layers, request.pins.typed["recompute"]
        if every > layers:
            raise ConfigError(
                UNKNOWN_PIN.problem(
                    f"{typed}: {request.model.name} has {layers} blocks, fewer than {every}",
                    set_by=typed,
                    suggestions=[pin_word("recompute", layers)],
                )
            )
        if operators:
            policy = {"recompute.policy": "full", "recompute.every": every} if every > 0 else {}
            settings = {"recompute.policy": "selective", **policy}
            request.job({**settings, "recompute.operators": list(operators)})


def trainer_meant(typed: str) -> str | None:
    """Return the generation of trainers a name means (`Megatron_LM`); None if there is none."""
    names = {**{name: name for name in FRAMEWORKS}, **ALSO_CALLED}
    alike = {"".join(name_parts(name)): meant for name, meant in names.items()}
    return names.get(typed) or alike.get("".join(name_parts(typed)))


def _wrong_aims(aim: SearchAim) -> Iterator[Problem]:
    """Yield what is wrong with what is wanted of plans: Python hands on whatever was typed."""
    typed, names = f"--trainer {aim.trainer}", tuple(sorted({*FRAMEWORKS, *ALSO_CALLED}))
    if aim.trainer not in FRAMEWORKS:
        near = did_you_mean(aim.trainer, names) or names
        reason = f"{typed}: there are no figures of that trainer"
        yield UNKNOWN_TRAINER.problem(reason, set_by=typed, suggestions=near)
    objectives: tuple[str, ...] = get_args(Objective)
    if aim.objective not in objectives:
        typed = f"--objective {aim.objective}"
        yield BAD_ARGUMENT.problem(
            f"{typed} is none of {', '.join(objectives)}",
            set_by=typed,
            suggestions=[f"--objective {one}" for one in objectives],
        )
    if aim.objective == "cost" and aim.price is None:
        yield OBJECTIVE_NEEDS_PRICE.problem(
            "--objective cost needs the price of a device for an hour",
            set_by="--objective cost",
            suggestions=("--price 2.5", "--objective throughput"),
        )
    if aim.price is not None and not 0 < aim.price < inf:
        typed = f"--price {aim.price:g}"
        yield BAD_ARGUMENT.problem(
            f"{typed} is no price of a device for an hour",
            set_by=typed,
            suggestions=("--price 2.5",),
        )


def _require_open_length(aim: SearchAim, settings: Sequence[str]) -> None:
    """Refuse a length of sequences where the longest is looked for."""
    typed = [text for text in settings if text.partition("=")[0].strip() == LENGTH_KEY]
    if aim.objective == LONGEST_SEQUENCE and typed:
        objective = f"--objective {LONGEST_SEQUENCE}"
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"{objective} looks for {LENGTH_KEY}, and --set {typed[0]} says it",
                set_by=f"{objective} --set {typed[0]}",
                suggestions=(objective, f"--set {typed[0]}"),
            )
        )


def trainer_software(trainer: str, run: Plan) -> TrainerConstants:
    """Return the facts of a trainer with the dtypes of a run, on its devices.

    Ours takes the bytes of gradients and of their sums from the run; others have them fixed.
    """
    software, numbers = constants_of_trainer(trainer, run.cluster), run.mathematics
    found = constants_for_precision(software, numbers.precision, numbers.optimizer.kind)
    found = found if trainer == OURS else replace(software, element_bytes=found.element_bytes)
    return constants_on_devices(found, run.cluster, trainer=trainer, kernels=run.layout.kernels)


def _pins_for_trainer(pins: Pins, trainer: str, typed: str, *, experts: bool) -> Pins:
    """Return pins within what a trainer can run; ConfigError where it can run none of them.

    `typed` is what the user called the trainer.
    """
    able = abilities_of_trainer(trainer)
    if able is None:
        return pins
    found = replace(pins, limits=limits_of_tool(able, experts=experts))
    wrong = [name for name in pins.values if not found.values_of(name)]
    if wrong:
        raise ConfigError([_pin_not_supported(found, typed, name) for name in wrong])
    return found


def _pin_not_supported(pins: Pins, trainer: str, name: str) -> Problem:
    typed = pins.typed[name]
    return TRAINER_RUNS_PIN.problem(
        f"{typed}: {trainer} cannot run that",
        set_by=f"{typed}, --trainer {trainer}",
        suggestions=[f"--pin {name}={pin_word(name, one)}" for one in pins.limits[name]],
    )


def _is_layout(key: str) -> bool:
    return key.startswith(LAYOUT_TABLES) or key in LAYOUT_KEYS


def without_keys(layer: Mapping[str, Entry], keys: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of a layer without `keys`."""
    return {key: entry for key, entry in layer.items() if key not in keys}


def _gathered(model: str | Path, cluster: str | None, settings: Sequence[str]) -> SettingLayers:
    """Return the layers of the run without its layout."""
    typed: dict[str, Entry] = {}
    if cluster is not None:
        typed |= typed_cluster(cluster, f"--cluster {quote(cluster)}")
    if is_hf_config(model):
        gathered = SettingLayers()
        typed["model.hf_config"] = Entry(value=str(model), source=str(model), folder=Path())
        entries, problems = parse_set_flags(settings, typed)
        gathered.problems.extend(problems)
        gathered.add(entries)
    else:
        gathered = gather_layers(model, settings, typed)
        gathered.problems[:] = [or_else(one, "a model's config.json") for one in gathered.problems]
    if cluster is not None:
        # The run file's own cluster gives way to the one that is asked for.
        *below, last = gathered.layers or [{}]
        gathered.layers[:] = [*(without_keys(one, CLUSTER_SOURCES) for one in below), last]
    gathered.layers[:] = [
        {key: entry for key, entry in layer.items() if not _is_layout(key)}
        for layer in gathered.layers
    ]
    return gathered


def or_else(problem: Problem, *files: str) -> Problem:
    """Return the problem of a name that is no preset with the `files` that may be named instead."""
    if problem.rule != UNKNOWN_PRESET.id or problem.key:
        return problem
    return replace(problem, suggestions=(*problem.suggestions, *files))


def names_a_model(run: str | Path) -> bool:
    """Return whether what a user names is a model, of a preset or a config.json, and no run."""
    preset = preset_meant(str(run), Path(run))
    return (preset is not None and preset.kind == "models") or is_hf_config(run)


def asks_what_exists(run: str | Path, settings: Sequence[str]) -> bool:
    """Return whether a model is named, and nothing of its devices or its layout."""
    keys = [text.strip() for text in settings]
    return names_a_model(run) and not any(
        key.startswith(("cluster.", *LAYOUT_TABLES)) for key in keys
    )


def is_hf_config(model: str | Path) -> bool:
    """Return whether a model is named by the path of a config.json, or of a folder with one."""
    path = Path(model)
    return str(model).endswith(".json") or (path.is_dir() and (path / "config.json").is_file())


def request_on_cluster(request: SearchRequest, cluster: Cluster) -> SearchRequest:
    """Return the same request on other devices."""
    layer = {"cluster.preset": Entry(value=cluster.name, source=f"--cluster {cluster.name}")}
    kept = tuple(without_keys(one, CLUSTER_SOURCES) for one in request.layers)
    alone = replace(request.one_rank_run, cluster=cluster)
    if cluster.backend != request.cluster.backend:
        # Devices of another kind may have other kernels.
        there = replace(request, layers=(*kept, layer)).job({}).plan.layout.kernels
        alone = replace(alone, layout=replace(alone.layout, kernels=there))
    software = trainer_software(request.trainer, alone)
    return replace(
        request, cluster=cluster, one_rank_run=alone, layers=(*kept, layer), software=software
    )


def request_with_settings(request: SearchRequest, settings: Mapping[str, object]) -> SearchRequest:
    """Return the same request with other settings of its run; ConfigError where a rule breaks.

    A batch that nobody asked for follows a new length of sequences, as it does on the command line.
    """
    added = dict(settings)
    length = added.get(LENGTH_KEY)
    if isinstance(length, int) and SEQUENCES_KEY not in added and _batch_source(request) == DEFAULT:
        added[SEQUENCES_KEY] = max(1, TOKENS_OF_A_BATCH // length)
    layer = {key: Entry(value=value, source="") for key, value in added.items()}
    changed = replace(request, layers=(*request.layers, layer))
    alone = replace(changed.job({}).plan, cluster=request.cluster)
    return replace(changed, one_rank_run=alone, software=trainer_software(request.trainer, alone))


def batch_is_assumed(request: SearchRequest) -> bool:
    """True if the sequences of a global batch are a default, or of a model's preset."""
    source = _batch_source(request)
    return source == DEFAULT or any(assumed_batch({SEQUENCES_KEY: source}))


def _batch_source(request: SearchRequest) -> str:
    asked = [one[SEQUENCES_KEY].source for one in request.layers if SEQUENCES_KEY in one]
    return asked[-1] if asked else ""
