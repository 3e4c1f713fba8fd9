# SPDX-License-Identifier: Apache-2.0
"""`ec.generate`: what a trained model writes after prompts, on one rank or on several.

All that can be known is checked before the first rank starts. One rank is this process; more are
started here, or are there already under torchrun.

`echelon data look`: data of a run, or of a folder of prepared data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.training import TrainResult
from echelon.config.generation import Request, Sampling, generation_plan, require_request
from echelon.core.cluster import Backend
from echelon.core.errors import ConfigError
from echelon.core.optional import optional_package
from echelon.core.plan import Plan
from echelon.core.rulebook.data import SAMPLE_OF_STEP
from echelon.core.units import binary_bytes
from echelon.training.data.batches import BatchLayout
from echelon.training.data.look import SampleLook, SourceLook, look_at_sample, look_at_sources
from echelon.training.data.mixed_dataset import open_data

if TYPE_CHECKING:
    from echelon.cost.bytes.generate import KindCacheSizes
    from echelon.launch.room import Need
    from echelon.training.inference import GenerateTask, RankWriting

GENERATE_RANK = "echelon.training.inference:generate_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The written text, with its tokens and seconds; `rank` is 0 except under torchrun."""

    prompts: tuple[str, ...]
    """The prompts, in the order in which they were given."""
    written: tuple[str, ...]
    """What was written after each."""
    tokens: tuple[tuple[int, ...], ...]
    """The ids of that."""
    ended: tuple[bool, ...]
    """Whether each text came to its end, rather than to the most tokens."""
    stopped: bool
    """Whether someone asked to stop before."""
    checkpoint: Path
    """What was read."""
    cache_bytes: tuple[int, ...]
    """Bytes of keys and values that each rank held; under torchrun those of this rank."""
    seconds_s: float
    """How long the slowest rank wrote, from its first prompt on."""
    rank: int = 0
    """This rank."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return each prompt with what was written after it."""
        return tuple(map("".join, zip(self.prompts, self.written, strict=True)))

    @property
    def text(self) -> str:
        """Return the first of the texts."""
        return self.texts[0]


def generate(  # noqa: PLR0913 - each is one choice of the caller, by its name
    run: TrainResult | str | Path,
    prompt: str | Sequence[str],
    *,
    max_tokens: int = 100,
    temperature: float = 0.6,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    block_tokens: int = 16,
    settings: Sequence[str] = (),
    allow_overcommit: bool = False,
) -> Generated:
    """Return the text that a trained model writes after a prompt, or after each of several.

        ec.generate("runs/nano", "def ", temperature=0, settings=["mesh.tp=2"]).text

    `run` is what `ec.train` returned, the folder of a run (its newest checkpoint is taken) or of a
    checkpoint in one. `settings` split the model over ranks: mesh.tp, mesh.pp, mesh.ep,
    experts.expert_tp, and mesh.dp_replicate, whose ranks share out the prompts; how the run was
    split in training does not matter. At a temperature of 0 the likeliest token is taken; else one
    is drawn from `top_k` ids, or from the likeliest ones that have `top_p` together. What is drawn
    hangs on the seed, the prompt and its number, and not on the layout. A text ends at the token
    that ends documents, or after `max_tokens`. Keys and values are kept in blocks of `block_tokens`
    positions. With `allow_overcommit` ranks start where this host has not enough free memory.

    Raises ConfigError, InfeasiblePlan, CheckpointError, DataError, EnvironmentProblem, and
    RunFailed where a rank did not come to its end.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = Request(max_tokens=max_tokens, sampling=sampling, block_tokens=block_tokens)
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    return generate_texts(
        run, prompts, request, settings=settings, allow_overcommit=allow_overcommit
    )


def generate_texts(
    run: TrainResult | str | Path,
    prompts: tuple[str, ...],
    request: Request,
    *,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    allow_overcommit: bool = False,
) -> Generated:
    """Return what is written after prompts; `say` is told of the cache before the first rank."""
    from echelon.launch.room import require_room
    from echelon.telemetry.run_directory import run_of
    from echelon.training.checkpoint.folder import find_checkpoint

    path = run.run if isinstance(run, TrainResult) else Path(run)
    directory = run_of(path)
    trained = directory.plan()
    plan = generation_plan(trained, settings)
    checkpoint = find_checkpoint(path).path
    optional_package("torch", extra="train", purpose="generating text")
    from echelon.training.inference import GenerateTask, rank_cache_size

    data = run.data if isinstance(run, TrainResult) else data_of_run(directory.run_file)
    dataset = open_data(data)
    tokenizer = dataset.tokenizer()
    ids = tuple(tuple(tokenizer.encode(text)) for text in prompts)
    lengths = [len(tokens) for tokens in ids]
    require_request(plan, request, lengths)
    say(cache_text(plan, rank_cache_size(plan, 0, request, lengths)))
    need = _memory_need(plan, request, lengths)
    require_room(plan, need, allow_overcommit=allow_overcommit, say=say)
    end = tokenizer.description.end_of_document
    separate = plan.mathematics.documents == "separate" and dataset.shows_ends
    task = GenerateTask(
        plan=plan,
        trained=trained,
        checkpoint=str(checkpoint),
        tokenizer_hash=tokenizer.description.hash,
        prompts=ids,
        request=request,
        end=end,
        separator=end if separate else None,
    )
    rank, results = _run(task)
    first = results[0]
    return Generated(
        prompts=prompts,
        written=tuple(tokenizer.decode(one) for one in first.written),
        tokens=first.written,
        ended=first.ended,
        stopped=first.stopped,
        checkpoint=checkpoint,
        cache_bytes=tuple(one.cache_bytes for one in results),
        seconds_s=max(one.seconds_s for one in results),
        rank=rank,
    )


def _memory_need(plan: Plan, request: Request, lengths: Sequence[int]) -> Need:
    """Need of the ranks of this host: weights, and a cache of keys and values."""
    from echelon.cost.bytes.generate import generation_weight_bytes
    from echelon.cost.peak.rank_peak import PlaceMemory
    from echelon.launch.room import GPU_PROCESS_BYTES, RANK_PROCESS_BYTES, Need, ranks_of_this_host
    from echelon.training.inference import rank_cache_size

    on_gpu = _backend(plan) == "nccl"
    counts = Counter(
        (
            generation_weight_bytes(plan, rank),
            rank_cache_size(plan, rank, request, lengths).num_bytes,
        )
        for rank in ranks_of_this_host(plan.mesh.world_size)
    )
    places: list[PlaceMemory] = []
    for (weights, cache), count in counts.items():
        terms = {"parameters": float(weights), "cache": float(cache)}
        device, host = (terms, {}) if on_gpu else ({}, terms)
        places.append(PlaceMemory(num_ranks=count, device=device, host=host))
    return Need(
        places=tuple(places), process_bytes=GPU_PROCESS_BYTES if on_gpu else RANK_PROCESS_BYTES
    )


def cache_text(plan: Plan, found: KindCacheSizes) -> str:
    """Return how large the cache of a rank is, and why, in one line."""
    model, tp = plan.model, plan.mesh.tp
    if model.latent is not None:
        width = f"({model.latent.kv_rank} + {model.latent.rope_dim})"
    else:
        heads = f"{model.kv_heads}" if tp == 1 else f"{model.kv_heads}/{tp}"
        width = f"2 x {heads} x {model.head_dim}"
    terms = " + ".join(
        f"{size.num_blocks} blocks x {size.block_tokens} positions x {size.layers} layers x "
        f"{width} numbers x {size.element_bytes} bytes"
        for size in found.sizes
    )
    return f"cache: {binary_bytes(found.num_bytes)} a rank = {terms}"


def _run(task: GenerateTask) -> tuple[int, tuple[RankWriting, ...]]:
    """Return this rank, and what each rank that is known here found."""
    from echelon.core.serialize import to_json
    from echelon.launch.environment import is_launched
    from echelon.launch.launched.rank import run_launched_rank
    from echelon.launch.local.supervisor import LaunchOptions, run_ranks

    mesh = task.plan.mesh
    labels = tuple(map(mesh.label, range(mesh.world_size)))
    options = LaunchOptions(backend=_backend(task.plan))
    if is_launched():
        outcome = run_launched_rank(GENERATE_RANK, to_json(task), labels=labels, options=options)
    elif mesh.world_size == 1:
        return 0, (_run_here(task),)
    else:
        outcome = run_ranks(
            GENERATE_RANK, to_json(task), world_size=mesh.world_size, labels=labels, options=options
        )
    return outcome.rank, outcome.require()


def _run_here(task: GenerateTask) -> RankWriting:
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    from echelon.core.serialize import to_json
    from echelon.launch.context import RankContext, RankProgress
    from echelon.launch.process_group import device_of
    from echelon.launch.stop import stop_request
    from echelon.training.inference import generate_rank

    with ExitStack() as stack:
        stop, progress = stack.enter_context(stop_request()), RankProgress()
        progress.announce = lambda: stack.enter_context(stop.answered_by(progress.request_stop))
        context = RankContext(
            rank=0,
            world_size=1,
            device=device_of(_backend(task.plan), 0),
            store=HashStore(),
            progress=progress,
        )
        return generate_rank(context, to_json(task))


def _backend(plan: Plan) -> Backend:
    """Return how ranks talk: a run of GPUs may be asked to write where there are none."""
    import torch

    enough = torch.cuda.device_count() >= plan.mesh.world_size
    return "nccl" if plan.cluster.backend == "nccl" and enough else "gloo"


def data_of_run(run_file: Path) -> Path:
    """Return the folder of the data that a run read; it is prepared again where it is gone."""
    from echelon.config.load import load_job
    from echelon.training.data.corpus import data_of_settings

    job = load_job(run_file)
    return data_of_settings(job.data, job.train.runs_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLook:
    """Sources of some data, and a sample of a step if one was asked for."""

    path: str
    hash: str
    sources: tuple[SourceLook, ...]
    sample: SampleLook | None = None


def look_at(path: str | Path, *, step: int | None = None, sample: int = 0) -> DataLook:
    """Look at the data of a run, or at a folder of prepared data.

    `step` (from 1) and `sample` (from 0) ask for the text of a sample of a run. DataError if
    the data is missing or damaged; ConfigError if there is no such sample.
    """
    from echelon.config.load import load_job
    from echelon.telemetry.run_directory import run_of

    folder = Path(path)
    if not (folder / "plan.json").is_file() and folder.parent.name != "checkpoints":
        if step is not None:
            raise ConfigError(
                SAMPLE_OF_STEP.problem(
                    f"{folder} is no run, so it has no step {step}",
                    suggestions=("echelon data look RUN --step 1", f"echelon data look {folder}"),
                )
            )
        data = open_data(folder, verify=True)
        return DataLook(path=str(folder), hash=data.index.hash, sources=look_at_sources(data))
    if sample and step is None:
        raise ConfigError(
            SAMPLE_OF_STEP.problem(
                f"sample {sample} is of a step, and no step is named",
                suggestions=(f"--step 1 --sample {max(sample, 0)}", "without --sample"),
            )
        )
    run = run_of(folder)
    job, layout = load_job(run.run_file), BatchLayout.from_plan(run.plan())
    dataset = open_data(data_of_run(run.run_file), train_on=job.data.train_on)
    training = dataset
    if job.data.validation_fraction > 0:
        training, _ = dataset.split(job.data.validation_fraction)
    shown = None
    if step is not None:
        shown = look_at_sample(
            training,
            layout,
            seed=run.plan().mathematics.seed,
            step=step,
            sample=sample,
            epoch_end=job.data.epoch_end,
        )
    return DataLook(
        path=str(folder),
        hash=dataset.index.hash,
        sources=look_at_sources(training, steps=job.train.steps, layout=layout),
        sample=shown,
    )
