"""Models, clusters and plans as numbers; what devices of a node share, its ranks share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.config.cluster.settings import named_cluster
from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.parameters import num_parameters, num_trained_parameters
from echelon.core.plan import Context, Recompute
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.peak.fullest_rank import pipeline_ends
from echelon.cost.seconds.from_plan import (
    constants_for_precision,
    cost_inputs_from_plan,
    layout_numbers_from_plan,
    machine_numbers_from_cluster,
    mean_keys_per_query,
    model_numbers_from_shape,
    with_adapters,
)
from echelon.schedule.build import SCHEDULES
from tests.cost.layouts import MIXED, SINGLE
from tests.parallel.layouts import NANO, plan_of


def test_a_padded_vocabulary_follows_the_tensor_degree() -> None:
    numbers = model_numbers_from_shape(NANO, 8, tp=np.array([1.0, 2.0, 8.0]))
    assert np.asarray(numbers.vocab).tolist() == [37.0, 38.0, 40.0]
    assert model_numbers_from_shape(NANO, 8).vocab == 37.0


def test_reach_is_half_of_a_sequence_under_a_causal_mask_and_less_with_a_window() -> None:
    assert mean_keys_per_query(NANO, 16) == 8.0
    assert mean_keys_per_query(replace(NANO, causal=False), 16) == 16.0
    # Queries 0 to 15 meet 1, 2, 3, 4, 4 ... keys: 58, less half a key each.
    assert mean_keys_per_query(replace(NANO, window=4), 16) == (58 - 8) / 16


def test_a_cluster_keeps_its_tiers_and_how_near_to_its_peaks_it_comes() -> None:
    cluster = named_cluster("32xh100", "")
    assert isinstance(cluster, Cluster)
    numbers = machine_numbers_from_cluster(cluster, "bf16")
    assert numbers.peak_flops == cluster.device.flops("bf16")
    assert numbers.matmul == cluster.device.efficiency.matmul
    assert [tier.degree for tier in numbers.tiers] == [float(k.degree) for k in cluster.links]
    assert numbers.node == 8.0
    wide = machine_numbers_from_cluster(cluster, "fp32", attention_dtype="bf16")
    assert (wide.peak_flops, wide.attention_flops) == (
        cluster.device.flops("fp32"),
        cluster.device.flops("bf16"),
    )


def test_one_device_has_a_tier_too_and_an_unknown_peak_a_rate() -> None:
    alone = named_cluster("1xh100", "")
    assert isinstance(alone, Cluster)
    assert [tier.degree for tier in machine_numbers_from_cluster(alone).tiers] == [1.0]
    unknown = replace(alone, device=replace(alone.device, peak_flops=()))
    assert machine_numbers_from_cluster(unknown).peak_flops == 10.0 * alone.device.memory_bandwidth


def test_a_plan_is_its_degrees_and_choices() -> None:
    plan = plan_of(
        model=replace(NANO, layers=8),
        pp=2,
        tp=2,
        cp=4,
        dp=2,
        dp_shard=3,
        schedule="interleaved-1f1b",
        virtual_stages=2,
        microbatches=4,
        recompute=Recompute(policy="full", every=2),
        context=Context(kind="ulysses-ring", ulysses_degree=2),
        sequence_parallel=True,
    )
    found = layout_numbers_from_plan(plan)
    assert (found.devices, found.dp, found.shard) == (96.0, 6.0, 12.0)
    assert (found.virtual, found.microbatches, found.recompute) == (2.0, 4.0, 0.5)
    assert (found.ulysses, found.gathered, found.sequence_parallel) == (2.0, 0.0, 1.0)
    assert list(SCHEDULES)[int(found.schedule)] == "interleaved-1f1b"


def test_dtypes_and_optimizer_say_how_many_bytes_a_weight_takes() -> None:
    mixed = constants_for_precision(TrainerConstants(), MIXED)
    assert (mixed.gradient_bytes, mixed.reduced_bytes, mixed.state_bytes) == (2.0, 4.0, 12.0)
    assert constants_for_precision(TrainerConstants(), SINGLE, "sgd").state_bytes == 4.0
    # Both moments and the master are read and written, a gradient is read, a parameter written.
    assert (mixed.update_traffic, mixed.norm_traffic) == (2 * 12.0 + 2 + 2, 2.0)
    assert (mixed.cast_traffic, mixed.copy_traffic) == (6.0, 6.0)
    single = constants_for_precision(TrainerConstants(), SINGLE)
    assert (single.update_traffic, single.cast_traffic) == (2 * 8.0 + 4 + 2 * 4, 0.0)


LINKS = (
    Link(name="inside", degree=4, bandwidth=8e9, latency_s=1e-4),
    Link(name="network", degree=8, bandwidth=4e9, latency_s=2e-4),
)


DEVICE = Device(
    name="core", memory_bytes=2**30, memory_bandwidth=1e10, peak_flops=(("fp32", 4e10),)
)


CLUSTER = Cluster(name="two nodes", device=DEVICE, devices_per_node=4, nodes=2, links=LINKS)


def test_ranks_on_fewer_cores_have_a_part_of_one() -> None:
    shared = replace(CLUSTER, device=replace(DEVICE, cores=2.0))
    alone, all_four = (
        machine_numbers_from_cluster(shared, "fp32", ranks=2),
        machine_numbers_from_cluster(shared, "fp32"),
    )
    assert alone == machine_numbers_from_cluster(CLUSTER, "fp32")
    assert (alone.share, all_four.share) == (1.0, 0.5)
    assert all_four.peak_flops == 2e10
    assert all_four.memory_bandwidth == 5e9
    assert [tier.latency_s for tier in all_four.tiers] == [2e-4, 4e-4]
    # More ranks than a node has devices are on several nodes.
    assert machine_numbers_from_cluster(shared, "fp32", ranks=8) == all_four


def test_devices_share_the_interfaces_of_their_node() -> None:
    inside, network = LINKS
    shared = replace(CLUSTER, links=(inside, replace(network, interfaces=1)))
    assert [tier.bandwidth for tier in machine_numbers_from_cluster(CLUSTER).tiers] == [8e9, 4e9]
    assert [tier.bandwidth for tier in machine_numbers_from_cluster(shared).tiers] == [8e9, 1e9]


SHAPE = replace(NANO, lora=Lora(rank=4, alpha=8.0, targets=LINEARS))


def test_a_shape_without_adapters_keeps_its_numbers() -> None:
    numbers = model_numbers_from_shape(NANO, 8)
    assert with_adapters(numbers, NANO) is numbers


def test_rows_and_weights_are_those_of_the_parameters() -> None:
    found = with_adapters(model_numbers_from_shape(SHAPE, 8), SHAPE)
    assert (found.adapters_attention_in, found.adapters_mlp_out) == (12.0, 4.0)
    each = float(found.adapters_whole) + float(found.adapters_split)
    assert each * SHAPE.layers == num_trained_parameters(SHAPE)
    assert found.trained == pytest.approx(num_trained_parameters(SHAPE) / num_parameters(SHAPE))


def test_a_rank_holds_all_weights_and_trains_adapters_alone() -> None:
    held = pipeline_ends(cost_inputs_from_plan(plan_of(model=SHAPE))).last
    assert float(held.shared) == num_parameters(SHAPE)
    assert float(held.trained) == num_trained_parameters(SHAPE)
