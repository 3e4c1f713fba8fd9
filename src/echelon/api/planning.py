# SPDX-License-Identifier: Apache-2.0
"""`ec.plan`, `ec.prove`, `ec.bisect`: plans, alone and compared with one process.

A run file or preset becomes a Plan; a model and a cluster become an answer: which plan is best, and
what it takes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.config.job import DataSettings
from echelon.config.load import load_job
from echelon.config.reading import require_subject
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import ConfigError, Problem
from echelon.core.optional import optional_package, require_package
from echelon.core.plan import Plan
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.cost.seconds.trainers import OURS
from echelon.planner.search.request import (
    LONGEST_SEQUENCE,
    SearchAim,
    asks_what_exists,
    make_request,
)

if TYPE_CHECKING:
    from echelon.planner.answer.answer import PlanAnswer, SizesAnswer
    from echelon.planner.search.request import Objective
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.run import RankRunner
    from echelon.proof.verdict import Proof

_MODULES_OF_PROOFS = (
    "echelon.proof.ranks",
    "echelon.training.subject",
    "echelon.training.whole_run",
)
"""What the ranks of a proof import: once, before they are forked."""

ModelName = Literal[
    "deepseek-v3",
    "gpt2",
    "gpt2-large",
    "gpt2-medium",
    "gpt2-xl",
    "gpt3-175b",
    "llama2-13b",
    "llama2-70b",
    "llama2-7b",
    "llama3-70b",
    "llama3-8b",
    "llama3.1-405b",
    "llama3.2-1b",
    "llama3.2-3b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-14b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "qwen3-4b",
    "qwen3-8b",
]
"""The presets of models, so that a type checker knows that one alone is searched for."""
Batch: TypeAlias = int | Mapping[str, int]
"""Sequences of the global batch, or settings of the table `[batch]` by their names."""


# A model by its own name is no run: what is returned of it is no Plan.
_LISTS = {"--pin": "pins", "--set": "settings"}
"""Flags that are repeated, and the lists that they are in Python."""
_NUMBERS = frozenset({"--price"})
_FLAG = r"--(?:cluster|pin|set|trainer|objective|price) (?:'[^']*'|\S*[^\s,;:.])"
"""A flag and its value, without the sign that ends a part of a sentence."""
_END = r"(?=$|[\s)]|[,;:.](?:\s|$))"
_FLAGS = re.compile(rf"{_FLAG}(?: {_FLAG})*|--search\b")


@overload
def plan(  # pyright: ignore[reportOverlappingOverload]
    run: ModelName,
    cluster: None = None,
    *,
    search: Literal[False] = False,
    trainer: str = OURS,
    batch: Batch | None = None,
    pins: Sequence[str] = (),
    objective: Objective = "time",
    price: float | None = None,
) -> PlanAnswer | SizesAnswer: ...


@overload
def plan(
    run: str | Path,
    cluster: None = None,
    *,
    batch: Batch | None = None,
    settings: Sequence[str] = (),
) -> Plan: ...


@overload
def plan(
    run: str | Path,
    cluster: str | Path,
    *,
    search: bool = False,
    trainer: str = OURS,
    batch: Batch | None = None,
    pins: Sequence[str] = (),
    objective: Objective = "time",
    price: float | None = None,
    settings: Sequence[str] = (),
) -> PlanAnswer: ...


@overload
def plan(
    run: str | Path,
    cluster: None = None,
    *,
    search: Literal[True],
    trainer: str = OURS,
    batch: Batch | None = None,
    pins: Sequence[str] = (),
    objective: Objective = "time",
    price: float | None = None,
    settings: Sequence[str] = (),
) -> PlanAnswer: ...


def plan(  # noqa: PLR0913 - each is one choice of the caller, by its name
    run: str | Path,
    cluster: str | Path | None = None,
    *,
    search: bool = False,
    trainer: str = OURS,
    batch: Batch | None = None,
    pins: Sequence[str] = (),
    objective: Objective = "time",
    price: float | None = None,
    settings: Sequence[str] = (),
) -> Plan | PlanAnswer | SizesAnswer:
    """Return the best plan of a model on a cluster, with all that is known of it, or that of a run.

        answer = ec.plan("llama3-8b", "8xh100", trainer="megatron-core", batch=512)

    `run` is a preset, a run.toml or a config.json. With a `cluster` (COUNTxDEVICE such as "8xh100",
    or a file), or with `search` on the cluster of the run, it is what `echelon plan --cluster`
    recommends: a PlanAnswer, which is taken wherever a plan is. Without, it is the Plan that the
    run itself says, checked by every rule; of a model (a preset or a config.json), of which nothing
    says where it runs or how it is split, it is the PlanAnswer on the GPUs of this machine, or a
    SizesAnswer on four clusters where it has none.

    `trainer` is whose seconds and abilities count, `pins` such as "tp=8" are choices to keep,
    `objective` is "time", "throughput", "cost" (with the `price` of a device for an hour),
    "devices", "expected" or "longest-sequence". `batch` is the sequences of a global batch, or
    settings of the table `[batch]`, as {"global_sequences": 512, "sequence_length": 4096};
    `settings` are "table.key=value", as after `--set`. Raises ConfigError with every problem that
    there is, InfeasiblePlan where no plan is legal and fits.
    """
    aim = SearchAim(objective=objective, price=_price(price), trainer=str(trainer))
    pins, settings = _texts("pins", pins, "tp=8"), _texts("settings", settings, "mesh.tp=8")
    of_batch = _settings_of_batch(batch)
    given = {one: f"settings={json.dumps([one])}" for one in settings}
    with errors_in_keywords({**given, **of_batch}):
        sets = [*of_batch, *settings]
        if cluster is None and not search and asks_what_exists(run, sets):
            return _on_what_exists(run, sets, pins, aim)
        if cluster is None and not search:
            _require_search(aim, pins)
            return load_job(run, sets).plan
        return _searched(run, None if cluster is None else _cluster_text(cluster), sets, pins, aim)


def _on_what_exists(
    run: str | Path, settings: Sequence[str], pins: Sequence[str], aim: SearchAim
) -> PlanAnswer | SizesAnswer:
    """Return what to run on the GPUs of this machine, or on four clusters where it has none."""
    from echelon.launch.gpus import own_cluster
    from echelon.planner.answer.answer import SizesAnswer
    from echelon.planner.explain.no_plan import NothingFits
    from echelon.planner.recommend.recommend import NO_SIZE, four_sizes

    own = own_cluster()
    if own.name is not None:
        return _searched(run, own.name, settings, pins, aim)
    if aim.objective == LONGEST_SEQUENCE:
        why = "is about one cluster, none is named, and this machine has no GPU that is known"
        raise _bad_argument(f"objective={aim.objective!r}", why, 'cluster="8xh100"')
    found = four_sizes(
        lambda name: make_request(run, cluster=name, settings=settings, pins=pins, aim=aim)
    )
    if not found:
        raise NothingFits(PLAN_FITS_MEMORY.problem(NO_SIZE))
    return SizesAnswer(found=tuple(found), unknown_gpus=own.unknown)


def _searched(
    run: str | Path,
    cluster: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    aim: SearchAim,
) -> PlanAnswer:
    from echelon.planner.answer.answer import PlanAnswer
    from echelon.planner.explain.no_plan import explain_no_plan
    from echelon.planner.recommend.recommend import Recommendation, recommend

    found = recommend(make_request(run, cluster=cluster, settings=settings, pins=pins, aim=aim))
    if isinstance(found, Recommendation):
        return PlanAnswer(found=found)
    if found.interrupted:
        raise KeyboardInterrupt
    raise explain_no_plan(found)


def _bad_argument(typed: str, why: str, instead: str) -> ConfigError:
    problem = BAD_ARGUMENT.problem(f"{typed} {why}", set_by=typed, suggestions=(instead,))
    return ConfigError(problem)


def _texts(name: str, given: Sequence[str], example: str) -> tuple[str, ...]:
    """Return a list of texts; a single one is a list of one, and nothing else is one."""
    found = (given,) if isinstance(given, str) else given
    if isinstance(found, Mapping) or not all(isinstance(one, str) for one in found):
        raise _bad_argument(f"{name}={given!r}", "is no list of texts", f'{name}=["{example}"]')
    return tuple(found)


def _price(given: float | None) -> float | None:
    """Return a price as a number; ConfigError where it is none."""
    try:
        return None if given is None else float(given)
    except (TypeError, ValueError):
        raise _bad_argument(f"price={given!r}", "is no number", "price=2.5") from None


def _settings_of_batch(batch: Batch | None) -> dict[str, str]:
    """Return each setting of a batch, and how it was written."""
    if batch is None:
        return {}
    if isinstance(batch, Mapping):
        return {f"batch.{key}={n}": f"batch={{{key!r}: {n!r}}}" for key, n in batch.items()}
    return {f"batch.global_sequences={batch}": f"batch={batch!r}"}


def _cluster_text(cluster: str | Path) -> str:
    """Return a cluster as it is typed; a Path is a file, whatever its name."""
    if isinstance(cluster, Path) and len(cluster.parts) == 1 and cluster.suffix != ".toml":
        return f"./{cluster}"
    return str(cluster)


def _require_search(aim: SearchAim, pins: Sequence[str]) -> None:
    """Refuse what is about a search where there is none: it would change nothing."""
    named = {
        f"trainer={aim.trainer!r}": aim.trainer != OURS,
        f"pins={list(pins)!r}": pins,
        f"objective={aim.objective!r}": aim.objective != "time",
        f"price={aim.price!r}": aim.price is not None,
    }
    if given := [name for name, is_given in named.items() if is_given]:
        problem = BAD_ARGUMENT.problem(
            f"{' and '.join(given)} is about a search, and without a cluster or search=True a run "
            "is planned as it is",
            set_by=", ".join(given),
            suggestions=('cluster="8xh100"', "search=True"),
        )
        raise ConfigError(problem)


def prove(
    plan: GivenPlan,
    *,
    subject: str | None = None,
    independent: bool = False,
    late: bool = False,
    export: bool = False,
    data: DataSettings | None = None,
) -> Proof:
    """Return the proof of `plan`: ranks started here, compared with one process tensor by tensor.

    The model is shrunk and the mesh kept. Where all holds, our trainer makes a whole run, from data
    on disk to text, with a resume under another layout. `subject` ("module:function") names another
    engine to put through the same claims, without that run. `independent` also compares the one
    process with a second implementation that shares no code with it, and with transformers where
    that is installed and has the model. With `late` all is run once more with operations that
    complete only when they are awaited, and must give the same bits. With `export`, and always if
    adapters are merged or a family of transformers has another layout of weights, the whole run
    ends with exports in every format, read by transformers and by the second implementation. The
    `data` of a run (`job.data`) are also read from their records, the first megabyte of each
    source.
    `plan` may also be what has one, such as the answer of `ec.plan`. `proof.proven` says whether it
    holds; `proof.require()` raises ProofFailed.
    """
    plan = plan_from_given(plan)
    if independent:
        optional_package("torch", extra="train", purpose="proving a plan")
        from echelon.proof.independent.comparison import independent_pass
        from echelon.proof.independent.optimizers import require_formula

        require_formula(plan.mathematics.optimizer)
        proof = prove(plan, subject=subject, late=late, export=export, data=data)
        beside = independent_pass(proof.shrunk_plan, proof.num_steps)
        return replace(proof, independent=beside)
    with ranks_of(plan, subject) as run_ranks:
        from echelon.proof.whole_run.whole_run import prove_with_whole_run

        proof = prove_with_whole_run(
            plan, run_ranks=run_ranks, subject=subject, late=late, export=export
        )
        if data is None or subject is not None or not proof.proven:
            return proof
        from echelon.proof.whole_run.own_data import data_pass

        return replace(proof, data=data_pass(plan, data, run_ranks=run_ranks))


def prove_quickly(plan: GivenPlan, *, subject: str | None = None, late: bool = False) -> Proof:
    """Return the proof of the first steps of `plan`, in float64; `proof.left_out` names the rest.

    `subject` and `late` mean the same as in `prove`. Only these steps are proven.
    """
    plan = plan_from_given(plan)
    with ranks_of(plan, subject) as run_ranks:
        from echelon.proof.run import OUR_ENGINE
        from echelon.proof.run import prove as prove_steps

        engine = subject or OUR_ENGINE
        proof = prove_steps(plan, run_ranks=run_ranks, subject=engine, late=late, quick=True)
    if subject is not None:
        return proof
    return replace(proof, left_out=(*proof.left_out, "a whole run of the trainer"))


def bisect(
    plan: GivenPlan, *, subject: str | None = None, late: bool = False, export: bool = False
) -> Bisection | None:
    """Return the smallest run that fails its proof as `plan` does; None where `plan` is proven.

    Settings, axes of the mesh, blocks and microbatches are left out or halved as long as the same
    rule is broken; every run on the way is proven as `prove` does (`late` and `export` or not), on
    ranks started here.
    """
    plan = plan_from_given(plan)
    with ranks_of(plan, subject) as run_ranks:
        from echelon.proof.bisect.bisect import bisect as bisect_with
        from echelon.proof.whole_run.whole_run import prove_with_whole_run

        prover = partial(
            prove_with_whole_run, run_ranks=run_ranks, subject=subject, late=late, export=export
        )
        return bisect_with(plan, prover)


@contextmanager
def ranks_of(plan: Plan, subject: str | None) -> Iterator[RankRunner]:
    """Start the ranks of `plan`, which prove it, and smaller ones.

    Those of our own engine begin at once. What another is called may be wrong: that is told first.
    """
    require_trainable(plan)
    if subject is not None:
        require_subject(subject)
    from echelon.config.rules.finders import require_offload_dir
    from echelon.launch.local.supervisor import RankPool
    from echelon.launch.room import require_kernels
    from echelon.launch.root_cause import RankFailure
    from echelon.proof.shrink import shrink

    require_package("torch", extra="train", purpose="proving a plan")
    require_kernels(plan.layout.kernels, "gloo")
    # What is proven is a small model; in float64 its slices are largest.
    require_offload_dir(shrink(plan, precision="fp64"), range(plan.mesh.world_size))
    try:
        with RankPool(plan.mesh.world_size, preloaded=_MODULES_OF_PROOFS) as pool:
            if subject is None:
                pool.begin()  # it imports torch, as this process does now
            optional_package("torch", extra="train", purpose="proving a plan")
            yield pool.run
    except RankFailure as failure:
        # What is the user's to mend is said as it is, not as the failure of some rank.
        if failure.error is not None:
            raise failure.error from None
        raise


@contextmanager
def errors_in_keywords(spelled: Mapping[str, str]) -> Iterator[None]:
    """Let a ConfigError name keywords instead of flags.

    `spelled` are settings, each as it was written: those of a layout become pins on their way.
    """
    try:
        yield
    except ConfigError as error:
        problems = [_in_keywords(problem, spelled) for problem in error.problems]
        raise error.with_problems(problems) from None


def _in_keywords(problem: Problem, spelled: Mapping[str, str]) -> Problem:
    def translated(text: str) -> str:
        # What was given is known to its end; of other values a space is the end.
        for flag, given in product(_LISTS, spelled):
            whole = re.escape(f"{flag} {given}") + _END
            text = re.sub(whole, lambda _, written=spelled[given]: written, text)
        return _FLAGS.sub(lambda found: keywords_from_flags(found[0]), text)

    return replace(
        problem,
        message=translated(problem.message),
        set_by=translated(problem.set_by),
        suggestions=tuple(map(translated, problem.suggestions)),
    )


def keywords_from_flags(flags: str) -> str:
    """Return flags with their values as the keywords of `ec.plan`."""
    if flags == "--search":
        return "search=True"
    try:
        words = shlex.split(flags)
    except ValueError:
        return flags
    lists: dict[str, list[str]] = {}
    found: list[str] = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag in _LISTS:
            lists.setdefault(_LISTS[flag], []).append(value)
        else:
            told = value if flag in _NUMBERS else json.dumps(value)
            found.append(f"{flag.removeprefix('--')}={told}")
    found += [f"{name}={json.dumps(values)}" for name, values in lists.items()]
    return " with ".join(found)
