"""Every plan that a command makes of a legal one, and runs: each is a plan that rules take."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.generation import Request, Sampling, generation_plan, require_request
from echelon.config.rules.finders import plan_problems
from echelon.core.plan import Plan
from echelon.cost.peak.rank_peak import with_few_microbatches
from echelon.interop.export import export_plan
from echelon.layout.islands import inner_plan, islands_of, without_losses
from echelon.proof.oracle.loss_scale import with_scale
from echelon.proof.run import offloaded_to, without_8_bits
from echelon.proof.shrink import shrink
from echelon.proof.sum_bounds import with_exact_sums, with_rounded_sums
from echelon.proof.whole_run.whole_run import PROMPTS, other_layout, with_bytes
from echelon.rehearsal.rank import with_short_rounds
from echelon.schedule.from_plan import pipeline_problems
from echelon.training.evaluator import plan_alone
from echelon.training.measure.trainer import unit_plan

MOST_PROMPTS = 3


def derived_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that commands make of `plan`, each with its name."""
    yield from _of_proof(plan)
    yield from _of_text(plan)
    yield "rehearsal", with_few_microbatches(with_short_rounds(plan))
    yield "evaluator", plan_alone(plan)
    yield "calibration", unit_plan(plan)
    if plan.mathematics.local_sgd.active:
        yield "an island", inner_plan(plan)
    first = with_bytes(shrink(with_exact_sums(without_losses(plan)), precision="fp64"))
    second = other_layout(first)
    yield "whole run, first", first
    yield "whole run, second", second
    yield from ((f"whole run, {name}", one) for name, one in _of_text(second))


def _of_proof(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that the ranks of a proof run."""
    exact = shrink(with_exact_sums(without_losses(plan)), precision="fp64", names_apart=True)
    own = shrink(with_exact_sums(without_losses(plan)))
    yield "proof in float64", exact
    yield "proof in its own precision", own
    yield "proof without 8 bits", without_8_bits(own)
    yield "proof with another loss scale", with_scale(own, 8.0)
    yield "proof with files", offloaded_to(exact, "/tmp")
    yield from (("proof with rounded sums", one) for one in with_rounded_sums(exact, plan))
    yield "proof with a lost island", shrink(with_exact_sums(plan), precision="fp64")
    yield from (("proof of an island", inner_plan(one)) for one in (exact, own) if islands_of(one))


def _of_text(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plans by which a trained model writes: after each number of prompts, and split."""
    if not plan.model.causal:
        return
    for count in range(1, MOST_PROMPTS + 1):
        found = generation_plan(plan, [f"mesh.dp_replicate={count}"])
        request = Request(max_tokens=1, sampling=Sampling())
        require_request(found, request, [len(prompt) for prompt in PROMPTS[:count]])
        yield f"text on {count} ranks", found
    mesh = plan.mesh
    yield (
        "text on its tensor and pipeline ranks",
        generation_plan(plan, [f"mesh.tp={mesh.tp}", f"mesh.pp={mesh.pp}"]),
    )


def broken_rules(plan: Plan) -> list[str]:
    """Return the rules that a plan breaks, with their messages."""
    found = [*plan_problems(plan), *pipeline_problems(plan)]
    return [f"{problem.rule}: {problem.message}" for problem in found]


def exported_again(plan: Plan) -> None:
    """Write a run file of a plan, and read it back: it must be the same plan."""
    export_plan(plan, "run.toml")
