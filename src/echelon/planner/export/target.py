"""What every target of an export has in common: a plan becomes keys, and is read back from them.

The keys are read as `echelon import` would read them. What comes out otherwise is refused; what
does not come out at all is recorded beside them where the tool takes it from elsewhere or where it
changes speed only, and is refused else. So no setting is lost, and each is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from echelon.config.entries import Entry
from echelon.config.foreign.importer import READERS, TOOLS, Kind
from echelon.config.foreign.ledger import Ledger
from echelon.config.foreign.surroundings import surroundings
from echelon.config.kinds import toml_text
from echelon.config.pipeline import EVEN, SCHEDULE_KEY, STAGES_KEY, VIRTUAL_KEY
from echelon.core.plan import Plan
from echelon.cost.balance import split_layers
from echelon.planner.export.settings import RunSettings, plan_settings, written_out

PLACE = Path("the plan")
COLUMNS = 76
PART_OF_SCALE = tuple(
    f"precision.loss_scale{part}" for part in ("", "_window", "_min", "_hysteresis")
)
FOLLOWERS: Mapping[str, tuple[str, ...]] = {
    SCHEDULE_KEY: (STAGES_KEY, VIRTUAL_KEY),
    "mesh.pp": (SCHEDULE_KEY, STAGES_KEY, VIRTUAL_KEY),
    "mesh.cp": ("context.kind", "context.ulysses_degree"),
    "mesh.ep": ("experts.expert_tp",),
    "optimizer.kind": ("optimizer.momentum", "optimizer.newton_schulz_steps"),
    "optimizer.schedule": (
        "optimizer.decay_steps",
        "optimizer.final_ratio",
        "optimizer.warmup_steps",
    ),
    "precision.gradients": ("precision.reduction",),
    "precision.loss_scaling": PART_OF_SCALE,
    "precision.parameters": ("precision.loss_scaling", *PART_OF_SCALE),
    "recompute.every": ("recompute.policy",),
    "zero.stage": ("zero.reshard_after_forward", "zero.prefetch", "zero.unit_blocks"),
}
"""Settings that are no news where another is refused."""

PASSES = 2
"""What is recorded depends on what the keys say, and a key may be read by what is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Say of a setting why it is recorded, and does not stand in the words of the tool."""

    setting: str
    value: object
    why: str

    def text(self) -> str:
        """Return the note as a line."""
        return f"{self.setting} = {toml_text(self.value)}: {self.why}"

    def to_json(self) -> dict[str, object]:
        """Return the note as a JSON object."""
        return {"setting": self.setting, "value": self.value, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Say of a setting why a tool cannot honour it, and which settings instead might do."""

    setting: str
    value: object
    why: str
    works: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Describe a tool: the keys that a plan becomes, their form, and what it has no word for.

    `elsewhere` names settings, or tables of them, that the tool takes from a script or a launcher;
    `speed` those that change speed and memory only; both say why. `reasons` say why others cannot
    be honoured, and `misfits` yields what the keys could say and the tool would refuse. `advice`
    are lines for the head of the file. Where keys say the whole model (`says_model`), no preset is
    recorded beside them.
    """

    kind: Kind
    keys: Callable[[Plan, Mapping[str, object]], Mapping[str, object]]
    render: Callable[[Mapping[str, object], Sequence[str], Mapping[str, object]], str]
    misfits: Callable[[Plan], Iterator[Refusal]]
    advice: Callable[[Plan], Iterator[str]]
    elsewhere: Mapping[str, str]
    speed: Mapping[str, str]
    reasons: Mapping[str, str]
    says_model: bool = False

    @property
    def tool(self) -> str:
        """Return the name of the tool."""
        return TOOLS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Hold what an export to one target gives: its keys, what is recorded, told and refused.

    `said` are the settings that its keys say as they are.
    """

    said: frozenset[str]
    keys: Mapping[str, object]
    recorded: Mapping[str, object]
    notes: tuple[Note, ...]
    refusals: tuple[Refusal, ...]


def attempt(target: Target, plan: Plan, run: RunSettings) -> Attempt:
    """Return what an export of a plan, whose settings are `run`, gives."""
    keys = target.keys(plan, run.settings)
    settings, recorded = run.settings, run.settings
    if target.says_model:
        recorded = {key: value for key, value in settings.items() if not key.startswith("model.")}
        settings = written_out(plan.model) | recorded
    ledger = _read(target, keys, recorded)
    for _ in range(PASSES):
        recorded = _unsaid(settings, ledger)
        ledger = _read(target, keys, recorded)
    notes: list[Note] = []
    refusals = [*target.misfits(plan), *_of_problems(ledger), *_otherwise(target, plan, ledger)]
    for key, value in recorded.items():
        why = _because(target.elsewhere, key) or _because(target.speed, key)
        if why is not None:
            notes.append(Note(setting=key, value=value, why=why))
        else:
            why = _because(target.reasons, key) or f"{target.tool} has no word for it"
            refusals.append(Refusal(setting=key, value=value, why=why))
    return Attempt(
        said=frozenset(ledger.entries.keys() - {refusal.setting for refusal in refusals}),
        keys=keys,
        recorded=recorded,
        notes=tuple(notes),
        refusals=tuple(_first(refusals)),
    )


def _first(refusals: Iterable[Refusal]) -> list[Refusal]:
    """Return the first refusal of each setting, but for those that follow from another."""
    found: dict[str, Refusal] = {}
    for refusal in refusals:
        found.setdefault(refusal.setting, refusal)
    for key in [follower for cause in found for follower in FOLLOWERS.get(cause, ())]:
        found.pop(key, None)
    return list(found.values())


def _read(target: Target, keys: Mapping[str, object], recorded: Mapping[str, object]) -> Ledger:
    """Return what the keys are read as, beside what is recorded."""
    entries = {key: Entry(value=value, source=str(PLACE)) for key, value in recorded.items()}
    ledger = Ledger(tool=target.tool, path=str(PLACE), given=keys)
    READERS[target.kind](ledger, surroundings(entries, None))
    return ledger


def _unsaid(settings: Mapping[str, object], ledger: Ledger) -> dict[str, object]:
    """Return the settings that keys do not say: a preset of theirs is a whole model."""
    whole = "model.preset" in ledger.entries
    return {
        key: value
        for key, value in settings.items()
        if key not in ledger.entries and not (whole and key.startswith("model."))
    }


def _of_problems(ledger: Ledger) -> Iterator[Refusal]:
    for problem in ledger.problems:
        yield Refusal(setting=problem.key, value=None, why=problem.message)


def _otherwise(target: Target, plan: Plan, ledger: Ledger) -> Iterator[Refusal]:
    """Yield settings that the tool would have otherwise."""
    wanted = plan_settings(plan)
    for key, entry in ledger.entries.items():
        value = wanted.get(key, entry.value)
        if value != entry.value and not (entry.value == EVEN and _is_even(plan)):
            why = _because(target.reasons, key)
            would = f"{target.tool} would have {toml_text(entry.value)}"
            why = f"{why} ({would})" if why else would
            yield Refusal(setting=key, value=value, why=why, works=({key: entry.value},))


def _is_even(plan: Plan) -> bool:
    return plan.layout.pipeline.stages == split_layers(plan.model.layers, plan.num_stages)


def _because(reasons: Mapping[str, str], key: str) -> str | None:
    """Return the reason that is given for a setting, for its table, or for a table around it."""
    while key:
        if key in reasons:
            return reasons[key]
        key = key.rpartition(".")[0]
    return None


def heads(plan: Plan, target: Target, notes: Iterable[Note]) -> Iterator[str]:
    """Yield the lines that a file begins with: what it is, and what it cannot say."""
    for sentence in _sentences(plan, target, notes):
        yield from wrap(sentence, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _sentences(plan: Plan, target: Target, notes: Iterable[Note]) -> Iterator[str]:
    mesh, names = plan.mesh, ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    degrees = [f"{name}={getattr(mesh, name)}" for name in names if getattr(mesh, name) > 1]
    split = f" ({', '.join(degrees)})" if degrees else ""
    ranks = f"ranks: {mesh.world_size}{split}"
    yield f"Written by echelon export for {target.tool}: {plan.name}, {ranks}."
    yield f"echelon import FILE --kind {target.kind} reads it back as the same plan."
    yield from target.advice(plan)
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.why, []).append(note.setting)
    if by_reason:
        yield "Recorded below, because it stands elsewhere, or changes speed and memory only:"
    yield from (f"- {', '.join(names)}: {why}." for why, names in by_reason.items())
