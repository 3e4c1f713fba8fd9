# SPDX-License-Identifier: Apache-2.0
"""The plan by which a trained model writes: its mathematics, in another layout.

A checkpoint fits any layout. Settings of training without a meaning here (batch, schedule, ZeRO,
recompute, optimizer, balance, servers) have their plainest value in this plan. So the rules of
every plan can be asked of it: one that it breaks is about the model or about the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.config.entries import Entry
from echelon.config.rules.finders import plan_problems
from echelon.config.setting_layers import SettingLayers, parse_set_flags
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.plan import Layout, Mathematics, Pipeline, Plan, Precision
from echelon.core.rulebook.pipeline import LAYERS_FILL_STAGES
from echelon.core.rulebook.run import (
    GENERATE_CAUSAL,
    GENERATE_EXPERTS,
    GENERATE_FITS_POSITIONS,
    GENERATE_HAS_PROMPT,
    GENERATE_SAMPLING,
    GENERATE_SETTINGS,
    GENERATE_SHARES_PROMPTS,
)
from echelon.core.rules import nearest_divisors

GENERATION_KEYS = ("mesh.tp", "mesh.pp", "mesh.dp_replicate", "mesh.ep", "experts.expert_tp")
"""The settings that generation has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Say how a token is chosen; a temperature of 0 takes the likeliest.

    `top_k` leaves so many of the likeliest ids, `top_p` the fewest likeliest whose probabilities
    add up to it (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Say what is to be written after prompts, in tokens."""

    max_tokens: int = 100
    """The most tokens after each prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are chosen."""
    block_tokens: int = 16
    """Positions of a block of the cache."""


def generation_plan(trained: Plan, sets: Sequence[str]) -> Plan:
    """Return the plan that generates with a model as `sets` ("mesh.tp=2") split it.

    ConfigError where a setting is none of generation, InfeasiblePlan where the split is not legal.
    """
    entries = _entries(sets)
    degrees = {key: _integer(entries, key) for key in GENERATION_KEYS}
    tp, experts = degrees["mesh.tp"], trained.model.experts
    whole = "mesh.ep" not in entries and "experts.expert_tp" not in entries
    if experts is not None and whole and experts.num_experts % tp == 0:
        degrees["mesh.ep"] = tp
    mesh = Mesh(
        pp=degrees["mesh.pp"],
        dp_replicate=degrees["mesh.dp_replicate"],
        tp=tp,
        ep=degrees["mesh.ep"],
    )
    cluster = trained.cluster
    nodes = max(cluster.nodes, -(-mesh.world_size // cluster.devices_per_node))
    plan = Plan(
        name=trained.name,
        mathematics=_mathematics(
            trained.mathematics, global_sequences=mesh.dp_replicate, sequence_length=tp
        ),
        layout=Layout(
            mesh=mesh,
            microbatch_sequences=1,
            pipeline=Pipeline(schedule="gpipe", stages=_stages(trained.model.layers, mesh.pp)),
            experts=ExpertLayout(expert_tp=degrees["experts.expert_tp"]),
        ),
        cluster=replace(cluster, nodes=nodes),
    )
    found = [*_layout_problems(plan), *plan_problems(plan)]
    if found:
        raise InfeasiblePlan(
            replace(one, set_by=_source(entries, one.key) or one.set_by) for one in found
        )
    return plan


def require_request(plan: Plan, request: Request, prompts: Sequence[int]) -> None:
    """Raise ConfigError where prompts of so many tokens cannot be written on as is asked."""
    found = [*_prompt_problems(plan, request, prompts), *_sampling_problems(request)]
    if found:
        raise ConfigError(found)


def _entries(sets: Sequence[str]) -> Mapping[str, Entry]:
    layer, problems = parse_set_flags(sets)
    layers = SettingLayers(problems=problems)
    layers.add(layer)
    for key in layers.merged():
        if key not in GENERATION_KEYS:
            layers.add_problem(
                GENERATE_SETTINGS.problem(
                    f"{key} says nothing of how a trained model writes",
                    key=key,
                    set_by=_source(layer, key),
                    suggestions=[f"--set {one}=..." for one in GENERATION_KEYS],
                )
            )
    if layers.problems:
        raise ConfigError(layers.problems)
    return layers.merged()


def _integer(entries: Mapping[str, Entry], key: str) -> int:
    value = entries[key].value if key in entries else 1
    assert isinstance(value, int), "the schema has checked it"
    return value


def _source(entries: Mapping[str, Entry], key: str) -> str:
    return entries[key].source if key in entries else ""


def _mathematics(
    trained: Mathematics, *, global_sequences: int, sequence_length: int
) -> Mathematics:
    """Return the numbers that text depends on; the rest of training has its plainest value.

    No expert drops a token: its room is a share of a whole sequence, and a text has just begun.
    """
    precision = trained.precision
    return Mathematics(
        model=trained.model,
        global_sequences=global_sequences,
        sequence_length=sequence_length,
        documents=trained.documents,
        seed=trained.seed,
        precision=Precision(
            parameters=precision.parameters,
            master=precision.master,
            matmul=precision.matmul,
            fp8_block=precision.fp8_block,
        ),
        balance=Balance(route=trained.balance.route),
    )


def _stages(layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each stage, as even as they go, the first stages holding one more."""
    starts = [-(-layers * stage // pp) for stage in range(pp + 1)]
    return tuple(tuple(range(starts[s], starts[s + 1])) for s in range(pp))


def _layout_problems(plan: Plan) -> Iterator[Problem]:
    """Yield what only generation asks of a layout."""
    mesh, expert_tp, layers = plan.mesh, plan.layout.experts.expert_tp, plan.model.layers
    if mesh.pp > layers:
        yield LAYERS_FILL_STAGES.problem(
            f"mesh.pp = {mesh.pp}, but there are {layers} blocks ({layers} < {mesh.pp})",
            key="mesh.pp",
            suggestions=range(1, layers + 1)[-4:],
        )
    if not plan.model.causal:
        yield GENERATE_CAUSAL.problem(f"{plan.model.name} has causal = false", key="model.causal")
    if plan.model.experts is not None and mesh.ep not in (1, mesh.tp):
        yield GENERATE_EXPERTS.problem(
            f"mesh.ep = {mesh.ep}, and there are mesh.tp = {mesh.tp} tensor ranks",
            key="mesh.ep",
            suggestions=dict.fromkeys((1, mesh.tp)) if expert_tp == 1 else (1,),
        )


def _prompt_problems(plan: Plan, request: Request, prompts: Sequence[int]) -> Iterator[Problem]:
    dp, positions = plan.mesh.dp_replicate, plan.model.max_positions
    empty = [str(number) for number, tokens in enumerate(prompts) if not tokens]
    if not prompts or empty:
        what = f"prompt {', '.join(empty)} has no token" if prompts else "there is no prompt"
        yield GENERATE_HAS_PROMPT.problem(what, suggestions=("--prompt TEXT", "--prompt-file FILE"))
    elif len(prompts) < dp:
        yield GENERATE_SHARES_PROMPTS.problem(
            f"mesh.dp_replicate = {dp}, but prompts are {len(prompts)} ({len(prompts)} < {dp})",
            key="mesh.dp_replicate",
            suggestions=nearest_divisors(len(prompts), dp),
        )
    longest = max(prompts, default=0)
    needed = longest + request.max_tokens - 1
    if request.max_tokens >= 1 and needed > positions:
        room = positions - longest + 1
        short = f"a prompt of at most {positions - request.max_tokens + 1} tokens"
        yield GENERATE_FITS_POSITIONS.problem(
            f"the longest prompt has {longest} tokens, and {request.max_tokens} more take "
            f"{longest} + {request.max_tokens} - 1 = {needed} positions, but {plan.model.name} has "
            f"{positions}",
            suggestions=[f"--max-tokens {room}"] if room > 0 else [short],
        )


def _sampling_problems(request: Request) -> Iterator[Problem]:
    sampling = request.sampling
    counts = {"max-tokens": request.max_tokens, "block-tokens": request.block_tokens}
    if sampling.top_k is not None:
        counts["top-k"] = sampling.top_k
    for flag, value in counts.items():
        if value < 1:
            yield GENERATE_SAMPLING.problem(
                f"--{flag} {value} is below 1", suggestions=[f"--{flag} 1"]
            )
    if not 0 <= sampling.temperature < float("inf"):
        yield GENERATE_SAMPLING.problem(
            f"--temperature {sampling.temperature} is not a number from 0 up",
            suggestions=["--temperature 0", "--temperature 0.8"],
        )
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        yield GENERATE_SAMPLING.problem(
            f"--top-p {sampling.top_p} is not above 0 and at most 1", suggestions=["--top-p 0.9"]
        )
    limits = {"top-k": sampling.top_k, "top-p": sampling.top_p}
    given = [f"--{name}" for name, value in limits.items() if value is not None]
    if sampling.temperature == 0 and given:
        yield GENERATE_SAMPLING.problem(
            f"{' and '.join(given)} without effect: --temperature 0 takes the likeliest token",
            suggestions=["--temperature 0.8", f"no {' and no '.join(given)}"],
        )
