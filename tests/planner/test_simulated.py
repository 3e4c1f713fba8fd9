"""Plans timed event by event: what steps of fewer microbatches say of a whole one."""

from __future__ import annotations

from random import Random

import pytest

from echelon.core.mesh import Mesh
from echelon.cost.unit_times import UnitTimes, durations_of
from echelon.planner.choice import Choice
from echelon.planner.lanes import lanes_of
from echelon.planner.search import search
from echelon.planner.simulated import cut_stages, num_actions, simulated
from tests.planner.requests import small

LAYERS = 21
ORDERS = (
    ("1f1b", 4, 1, 100),
    ("1f1b", 5, 1, 133),
    ("interleaved-1f1b", 4, 3, 101),
    ("zb-h1", 4, 1, 102),
    ("zb-h2", 3, 1, 100),
    ("zb-v", 4, 2, 120),
    ("dualpipe-v", 4, 2, 121),
    ("dualpipe", 4, 1, 120),
    ("gpipe", 4, 1, 90),
)


def of_order(name: str, pp: int, virtual: int, microbatches: int) -> Choice:
    """Return a plan of a pipeline and nothing else."""
    return Choice(
        mesh=Mesh(pp=pp),
        sequence_parallel=False,
        context="ring",
        ulysses=1,
        expert_tp=1,
        microbatch=1,
        microbatches=microbatches,
        zero=0,
        reshard=True,
        offload=False,
        schedule=name,
        virtual=virtual,
        recompute=0,
        recomputed_share=0.0,
    )


def uneven_times(seed: int) -> UnitTimes:
    """Return seconds of units that are all different, with a head that is worth several."""
    random = Random(seed)
    units = ("embedding", *(f"layers.{layer}" for layer in range(LAYERS)), "head")
    forward, inputs, weights = (
        {unit: random.uniform(0.9, 1.1) * (3.0 if unit == "head" else 1.0) for unit in units}
        for _ in range(3)
    )
    return UnitTimes(
        source="modelled", forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_of_many_microbatches_is_timed_by_a_few_of_them(
    order: tuple[str, int, int, int],
) -> None:
    choice = of_order(*order)
    name, pp, virtual, microbatches = order
    for seed in range(2):
        times = uneven_times(seed)
        stages = cut_stages(choice, times, LAYERS)
        whole = lanes_of(name, pp * virtual, pp, microbatches)
        exact = whole.makespan_s(durations_of(stages, times))
        assert simulated(choice, times, stages) == pytest.approx(exact, rel=1e-9)
    assert num_actions(choice) < 3 * pp * virtual * microbatches


def test_every_pipeline_of_an_answer_is_timed_by_events() -> None:
    answer = search(small(memory_gb=4.0))
    found = [*answer.ranked, *answer.rest]
    assert any(one.choice.mesh.pp > 1 for one in found)
    assert all(one.simulated == (one.choice.mesh.pp > 1) for one in found)
