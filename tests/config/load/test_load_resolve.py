"""Resolution: stages, and that every accepted run holds the arithmetic of the others' layers."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.parameters import num_parameters, parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import all_rules
from echelon.cost.seconds.stages import split_layers
from tests.walks import examples

RULE_IDS = {rule.id for rule in all_rules()}
AXES = ("pp", "dp_replicate", "tp")


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (4, 2, (2, 2)),
        (5, 2, (3, 2)),
        (7, 3, (2, 3, 2)),
        (8, 3, (3, 3, 2)),
        (10, 4, (2, 3, 3, 2)),
        (11, 4, (3, 3, 3, 2)),
        (126, 16, (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)),
        (61, 16, (3, 3, *(4,) * 13, 3)),
        (3, 3, (1, 1, 1)),
        (9, 1, (9,)),
    ],
)
def test_the_ends_take_fewer_blocks(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    split = split_layers(layers, stages)
    assert tuple(map(len, split)) == counts
    assert list(chain.from_iterable(split)) == list(range(layers))


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_split_is_even_and_whole(layers: int, stages: int) -> None:
    split = split_layers(layers, stages)
    sizes = [len(stage) for stage in split]
    assert list(chain.from_iterable(split)) == list(range(layers))
    assert max(sizes) - min(sizes) <= 1
    assert len(split) == stages
    if stages > 2:
        assert min(sizes[1:-1]) >= max(sizes[-1], min(sizes[0], sizes[-1]))


def arithmetic_holds(plan: Plan) -> None:
    """Assert what the layers above take for granted of a plan."""
    model, mesh, layout = plan.model, plan.mesh, plan.layout
    assert mesh.world_size == mesh.pp * mesh.dp * mesh.cp * mesh.tp
    assert mesh.world_size <= plan.cluster.num_devices
    assert model.heads % mesh.tp == model.kv_heads % mesh.tp == model.ffn % mesh.tp == 0
    for spec in parameters(model):
        whole = spec.split_dim is None
        assert spec.local_numel(mesh.tp) * (1 if whole else mesh.tp) >= spec.numel
    share = layout.microbatch_sequences * mesh.dp * plan.num_microbatches
    assert share == plan.mathematics.global_sequences
    assert plan.num_microbatches >= (mesh.pp if layout.pipeline.schedule == "1f1b" else 1)
    assert plan.num_stages == mesh.pp * layout.pipeline.virtual_stages
    assert list(chain.from_iterable(layout.pipeline.stages)) == list(range(model.layers))
    assert plan.mathematics.sequence_length <= model.max_positions
    if layout.sequence_parallel:
        assert mesh.tp > 1
        assert plan.mathematics.sequence_length % mesh.tp == 0
    assert Plan.from_json(plan.to_json()) == plan


SETTINGS = st.fixed_dictionaries(
    {
        "model.layers": st.integers(1, 6),
        "model.heads": st.sampled_from([2, 4, 6, 12]),
        "model.kv_heads": st.sampled_from([1, 2, 4, 6]),
        "model.head_dim": st.sampled_from([4, 6]),
        "model.ffn": st.sampled_from([24, 30, 32]),
        "mesh.pp": st.integers(1, 4),
        "mesh.dp_replicate": st.integers(1, 4),
        "mesh.tp": st.sampled_from([1, 2, 3, 4]),
        "mesh.sequence_parallel": st.booleans(),
        "pipeline.schedule": st.sampled_from(["naive", "gpipe", "1f1b"]),
        "batch.global_sequences": st.sampled_from([4, 8, 12, 24]),
        "batch.microbatch_sequences": st.sampled_from([1, 2, 3]),
        "batch.sequence_length": st.sampled_from([8, 9, 12]),
    }
)


def is_legal(values: dict[str, object]) -> bool:
    """Say independently whether a run can be."""
    get = {key.partition(".")[2]: value for key, value in values.items()}
    tp, pp, dp = (int(str(get[name])) for name in ("tp", "pp", "dp_replicate"))
    heads, kv, ffn = (int(str(get[name])) for name in ("heads", "kv_heads", "ffn"))
    total, size = int(str(get["global_sequences"])), int(str(get["microbatch_sequences"]))
    length, parallel = int(str(get["sequence_length"])), bool(get["sequence_parallel"])
    return (
        min(tp, pp, dp) >= 1
        and heads % kv == 0
        and not any(count % tp for count in (heads, kv, ffn))
        and (not parallel or (tp > 1 and length % tp == 0))
        and total % (size * dp) == 0
        and (get["schedule"] != "1f1b" or total // (size * dp) >= pp)
        and int(str(get["layers"])) >= pp
        and tp * pp * dp <= 8
    )


def load(values: dict[str, object]) -> Plan | ConfigError:
    sets = [f"{key}={str(value).lower()}" for key, value in values.items()]
    try:
        return load_job("nano", sets).plan
    except ConfigError as error:
        return error


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(SETTINGS, st.sampled_from(AXES), st.integers(-1, 9))
def test_what_is_accepted_is_what_can_be(values: dict[str, object], axis: str, degree: int) -> None:
    for changed in (values, values | {f"mesh.{axis}": degree}):
        outcome = load(changed)
        if isinstance(outcome, Plan):
            assert is_legal(changed)
            arithmetic_holds(outcome)
        else:
            assert not is_legal(changed), str(outcome)
            assert set(outcome.rules) <= RULE_IDS
            assert all(problem.message for problem in outcome.problems)


def test_presets_give_plans_that_hold() -> None:
    sets = ["mesh.pp=4", "mesh.tp=8", "mesh.dp_replicate=2", "mesh.sequence_parallel=true"]
    plan = load_job("llama3-70b", [*sets, "cluster.preset=64xh100"]).plan
    arithmetic_holds(plan)
    assert num_parameters(plan.model) == 70_553_706_496
