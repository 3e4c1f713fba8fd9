"""Settings that cannot change anything, and settings that this version cannot honour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from echelon.config.checks import data_ranks
from echelon.config.job import ResolvedSetting
from echelon.config.kinds import toml_text
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.batch import LEARNING_RATE_FITS_STEPS
from echelon.core.rulebook.config import CONFLICTING_SETTINGS, NO_EFFECT, NOT_BUILT_YET

PRECISION = ("parameters", "gradients", "reduction", "master")
BUILT_DTYPES = ("fp32", "fp64")


def _no_effect(view: View, key: str, because: str, works: Iterable[str]) -> Iterator[Problem]:
    entry = view.entry(key)
    if not view.is_default(key):
        yield NO_EFFECT.problem(
            f"{key} = {toml_text(entry.value)} changes nothing: {because}",
            key=key,
            set_by=entry.source,
            works=(*works, f"{key} = {toml_text(SETTINGS[key].default)}"),
        )


def mesh_effects(view: View) -> Iterator[Problem]:
    """Yield settings that need another axis of the mesh."""
    if view.integer("mesh.tp") == 1:
        yield from _no_effect(
            view, "mesh.sequence_parallel", "it splits over tp, and mesh.tp = 1", ["mesh.tp = 2"]
        )
    if data_ranks(view) == 1:
        yield from _no_effect(
            view,
            "zero.bucket_bytes",
            "gradients are reduced over data ranks, and there is one",
            ["mesh.dp_replicate = 2"],
        )
    if view.integer("mesh.cp") == 1:
        yield from _no_effect(view, "context.kind", "it is how cp works, and mesh.cp = 1", [])


def zero_effects(view: View) -> Iterator[Problem]:
    """Yield a sharding degree without anything to shard."""
    if view.integer("zero.stage") == 0:
        shard, replicas = view.integer("mesh.dp_shard"), view.integer("mesh.dp_replicate")
        yield from _no_effect(
            view,
            "mesh.dp_shard",
            "zero.stage = 0 shares nothing out; whole replicas are dp_replicate",
            [f"mesh.dp_replicate = {shard * replicas}"],
        )


def recompute_effects(view: View) -> Iterator[Problem]:
    """Yield a recompute interval that nothing uses."""
    if view.word("recompute.policy") != "full":
        yield from _no_effect(
            view, "recompute.every", "it counts blocks of full recompute", ['policy = "full"']
        )


def position_effects(view: View) -> Iterator[Problem]:
    """Yield rotary settings of a model without rotary positions."""
    if view.word("model.positions") == "learned":
        why = 'rotary positions are not used with positions = "learned"'
        yield from _no_effect(view, "model.rope_theta", why, [])
        if view.has_table("model.rope_scaling"):
            key = "model.rope_scaling.factor"
            yield NO_EFFECT.problem(
                f"[model.rope_scaling] changes nothing: {why}", key=key, set_by=view.set_by(key)
            )


def learning_rate_effects(view: View) -> Iterator[Problem]:
    """Yield parts of the learning-rate schedule that its kind does not have."""
    kind, decay = view.word("optimizer.schedule"), view.integer("optimizer.decay_steps")
    if kind != "wsd":
        why = f'"{kind}" has no separate decay; it belongs to "wsd"'
        yield from _no_effect(view, "optimizer.decay_steps", why, ['schedule = "wsd"'])
    elif decay == 0:
        yield NO_EFFECT.problem(
            'optimizer.schedule = "wsd" with decay_steps = 0 never falls: it is "constant"',
            key="optimizer.schedule",
            set_by=view.set_by("optimizer.schedule", "optimizer.decay_steps"),
            works=('schedule = "constant"', "decay_steps = 100"),
        )
    if kind == "constant":
        why = "a constant learning rate ends where it is"
        yield from _no_effect(view, "optimizer.final_ratio", why, ['schedule = "cosine"'])


def validation_effects(view: View) -> Iterator[Problem]:
    """Yield settings of a validation that never happens, or that has nothing to read."""
    every = view.entry("train.validate_every").value
    if every == "never":
        why = 'train.validate_every = "never"'
        yield from _no_effect(view, "train.validation_batches", why, ["validate_every = 50"])
        return
    if view.number("data.validation_fraction") == 0:
        yield CONFLICTING_SETTINGS.problem(
            f"train.validate_every = {every}, but data.validation_fraction = 0 holds nothing out",
            key="data.validation_fraction",
            set_by=view.set_by("data.validation_fraction", "train.validate_every"),
            works=("data.validation_fraction = 0.01", 'train.validate_every = "never"'),
        )


def checkpoint_effects(view: View) -> Iterator[Problem]:
    """Yield a number of checkpoints to keep where none are written."""
    if view.entry("checkpoint.every").value == "never":
        why = 'checkpoint.every = "never"'
        yield from _no_effect(view, "checkpoint.keep", why, ["checkpoint.every = 100"])


def expert_effects(view: View) -> Iterator[Problem]:
    """Yield settings of experts: without effect on a dense model, else not built yet."""
    has_experts = view.has_table("model.experts")
    for name in ("capacity_factor", "balance", "expert_tp"):
        key = f"experts.{name}"
        if has_experts and not view.is_default(key):
            yield _not_built(view, key, [f"{key} = {toml_text(SETTINGS[key].default)}"])
        else:
            yield from _no_effect(view, key, f"{view.model_name} has no experts", [])


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


def _not_built(view: View, key: str, works: Iterable[str], why: str = "") -> Problem:
    value = toml_text(view.entry(key).value)
    return NOT_BUILT_YET.problem(
        f"{key} = {value} is designed but not built yet{why}",
        key=key,
        set_by=view.set_by(key),
        works=works,
    )


def not_built(view: View) -> Iterator[Problem]:
    """Yield every setting of the design that this version cannot honour."""
    tp = 'mesh.tp with sequence_parallel = true, or recompute.policy = "full"'
    instead = {
        "mesh.cp": ["mesh.cp = 1", tp],
        "mesh.ep": ["mesh.ep = 1"],
        "zero.stage": ["zero.stage = 0"],
        "zero.reshard_after_forward": ['"auto"'],
        "zero.optimizer_offload": ['"none"'],
        "zero.parameter_offload": ['"none"'],
        "pipeline.virtual_stages": ["pipeline.virtual_stages = 1"],
    }
    for key, works in instead.items():
        if key not in view.wrong and not view.is_default(key):
            yield _not_built(view, key, works)
    if "recompute.policy" not in view.wrong and view.word("recompute.policy") == "selective":
        yield _not_built(view, "recompute.policy", ['"none"', '"full"'])


def precision_built(view: View) -> Iterator[Problem]:
    """Yield a precision that this version does not train in."""
    keys = [f"precision.{name}" for name in PRECISION]
    dtypes = [view.word(key) for key in keys]
    if len(set(dtypes)) == 1 and dtypes[0] in BUILT_DTYPES:
        return
    first = next((key for key in keys if not view.is_default(key)), keys[0])
    yield NOT_BUILT_YET.problem(
        f"precision {', '.join(f'{n} {d}' for n, d in zip(PRECISION, dtypes, strict=True))} "
        "is designed but not built yet: today all four are the same, fp32 or fp64",
        key=first,
        set_by=view.set_by(*keys),
        works=[f'all four "{dtype}"' for dtype in BUILT_DTYPES],
    )


EFFECTS = (
    mesh_effects,
    zero_effects,
    recompute_effects,
    position_effects,
    learning_rate_effects,
    learning_rate_fits_steps,
    validation_effects,
    checkpoint_effects,
    expert_effects,
    not_built,
    precision_built,
)


def require_trainable(plan: Plan, sources: Sequence[ResolvedSetting] = ()) -> None:
    """Raise ConfigError where a model can be planned but not yet proven or trained."""
    model = plan.model
    missing: list[tuple[str, str]] = []
    if model.experts is not None:
        missing.append(("model.experts.num_experts", f"{model.name} has experts"))
    if model.latent is not None:
        missing.append(("model.latent.kv_rank", f"{model.name} has latent attention"))
    if model.gated and model.activation != "silu":
        missing.append(("model.activation", f"{model.name} has a gate with {model.activation}"))
    set_by = {setting.key: setting.source for setting in sources}
    problems = [
        NOT_BUILT_YET.problem(
            f"{what}: it can be planned, but not yet proven or trained",
            key=key,
            set_by=set_by.get(key, ""),
            works=("gpt2, llama, mistral and dense qwen shapes",),
        )
        for key, what in missing
    ]
    if problems:
        raise ConfigError(problems)
