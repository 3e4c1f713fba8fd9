"""What slow links force onto a step, checked where it can be worked out by hand."""

from __future__ import annotations

import pytest

from bench.cluster import Exposure
from bench.harness.exposed import (
    forced_by_data,
    forced_by_pipeline,
    forced_by_tensor,
    forced_s,
    transfer_s,
)
from bench.harness.hosts import Link
from bench.harness.spec import MODES, SIZES, Mode, Size
from bench.harness.work import work_of
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters

SPEC = SIZES["spec"]
SLOW = Link(bits_per_s=200e6, burst_bytes=0)
INSTANT = 1e-9


def _num_weights(size: Size) -> int:
    shape = ModelShape(
        name="bench",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        ffn=size.ffn,
        vocab=size.vocab,
        max_positions=size.sequence,
    )
    norms = (2 * size.layers + 1) * size.hidden
    return num_parameters(shape) - norms


def test_without_compute_data_parallelism_exposes_every_gradient() -> None:
    forced = forced_by_data(SPEC, MODES["dp2"], SLOW, INSTANT)
    assert forced == pytest.approx(4 * _num_weights(SPEC) / SLOW.bytes_per_s)


def test_with_endless_compute_only_the_last_gradient_is_exposed() -> None:
    forced = forced_by_data(SPEC, MODES["dp2"], SLOW, 1e6)
    assert forced >= 4 * SPEC.vocab * SPEC.hidden / SLOW.bytes_per_s
    last_block = (work_of(SPEC).projections + work_of(SPEC).mlp) * 4 / SLOW.bytes_per_s
    assert forced <= 4 * SPEC.vocab * SPEC.hidden / SLOW.bytes_per_s + last_block


def test_without_compute_tensor_parallelism_exposes_every_sum() -> None:
    payload = SPEC.global_sequences * SPEC.sequence * SPEC.hidden * 4
    sums = 4 * SPEC.layers + 2
    forced = forced_by_tensor(SPEC, MODES["tp2"], SLOW, INSTANT)
    assert forced == pytest.approx(sums * payload / SLOW.bytes_per_s)


def test_with_endless_compute_the_forward_sums_stay_exposed() -> None:
    payload = SPEC.global_sequences * SPEC.sequence * SPEC.hidden * 4
    forced = forced_by_tensor(SPEC, MODES["tp2"], SLOW, 1e6)
    assert forced == pytest.approx((2 * SPEC.layers + 1) * payload / SLOW.bytes_per_s)


def test_a_pipeline_is_forced_to_wait_for_the_first_and_the_last_message() -> None:
    message = 2 * SPEC.sequence * SPEC.hidden * 4 / SLOW.bytes_per_s
    forced = forced_by_pipeline(SPEC, MODES["pp2"], SLOW, 1e3)
    assert forced == pytest.approx(2 * message)


def test_a_pipeline_without_compute_sends_in_turn() -> None:
    message = 2 * SPEC.sequence * SPEC.hidden * 4 / SLOW.bytes_per_s
    forced = forced_by_pipeline(SPEC, MODES["pp2"], SLOW, INSTANT)
    assert 2 * message < forced <= 2 * MODES["pp2"].microbatches * message


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_slower_links_force_more(mode: Mode) -> None:
    slower = Link(bits_per_s=100e6, burst_bytes=0)
    assert 0 < forced_s(SPEC, mode, SLOW, 3.5) < forced_s(SPEC, mode, slower, 3.5)


def test_the_burst_of_a_link_goes_out_at_once() -> None:
    link = Link(bits_per_s=8e6, burst_bytes=1000)
    assert transfer_s(1000, link) == 0
    assert transfer_s(1_001_000, link) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shaped_s", "forced", "met", "says"),
    [(4.1, 1.0, True, "1.10x"), (4.2, 1.0, False, "1.20x"), (3.1, 0.0, True, "nothing is forced")],
)
def test_exposure_is_judged_by_what_is_forced(
    shaped_s: float, forced: float, met: bool, says: str
) -> None:
    exposure = Exposure(link=SLOW, shaped_s=shaped_s, free_s=3.0, forced_s=forced)
    assert exposure.met is met
    assert says in exposure.line()
