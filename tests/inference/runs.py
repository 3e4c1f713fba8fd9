"""Plans that generate, and what their ranks write."""

from __future__ import annotations

from typing import Any

from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from tests.inference.cases import MODELS, PROMPTS
from tests.parallel.layouts import plan_of

COUNT = 14  # tokens: more than a window, and than two blocks
WRITE = "tests.inference.targets:write"


def written(pool: RankPool, plan: Plan, target: str = WRITE, **changes: Any) -> list[Any]:
    """Return what each rank wrote."""
    argument = {"plan": plan.to_json(), "prompts": PROMPTS, "max_tokens": COUNT, **changes}
    return pool.run(target, argument, plan.mesh.world_size)


def generation_plan(name: str, **changes: Any) -> Plan:
    """Return a plan that generates: one microbatch crosses the pipeline."""
    return plan_of(model=MODELS[name], schedule="gpipe", microbatches=1, **changes)


def split_name(value: object) -> str:
    """Return how a case is called."""
    if isinstance(value, dict):
        return "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in value.items())
    return str(value)
