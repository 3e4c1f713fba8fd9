"""What pieces move is what a rehearsal counts of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.choices.kernels import Kernels
from echelon.core.plan import Plan
from echelon.cost.bytes.piece_traffic import kernel_facts
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from tests.rehearsal.work.block_work import recorded

EVERY = Kernels(provider="triton", fused=("norm", "residual", "rotary", "swiglu", "loss"))
TOKENS, HIDDEN, FFN = 8192, 4096, 14336
QUERIES_KEYS_VALUES = 4096 + 2 * 1024


def traffic(kernels: Kernels) -> tuple[float, float]:
    """Return the bytes of a block of Llama 3 8B forward and backward, by its constants."""
    facts = kernel_facts(kernels)
    width, inner = facts["width_bytes"] * HIDDEN, 1.5 * facts["inner_bytes"] * FFN
    heads = facts["head_bytes"] * QUERIES_KEYS_VALUES
    back = width * facts["width_passes"] + inner * facts["inner_passes"]
    back = back + heads * facts["head_passes"]
    return TOKENS * (width + inner + heads), TOKENS * back


@pytest.mark.parametrize(
    ("case", "kernels"),
    [("llama3-8b", EVERY), ("llama3-8b, plain", Kernels())],
)
def test_bytes_and_kernels_are_those_that_are_counted(case: str, kernels: Kernels) -> None:
    work = recorded()[case]
    forward, backward = traffic(kernels)
    assert forward == pytest.approx(work["block.F"]["bytes_of_memory_bound"], rel=0.01)
    assert backward == pytest.approx(work["block.BW"]["bytes_of_memory_bound"], rel=0.01)
    assert kernel_facts(kernels)["kernels"] == pytest.approx(work["block.F"]["kernels"], abs=2)


def test_with_norms_of_heads_kernels_move_little_more() -> None:
    work = recorded()["qwen3-8b"]
    forward, backward = traffic(EVERY)
    less = TOKENS * (FFN - 12288)
    swiglu = 1.5 * kernel_facts(EVERY)["inner_bytes"] * less
    assert forward - swiglu == pytest.approx(work["block.F"]["bytes_of_memory_bound"], rel=0.01)
    back = swiglu * kernel_facts(EVERY)["inner_passes"]
    assert backward - back == pytest.approx(work["block.BW"]["bytes_of_memory_bound"], rel=0.06)


def plan(*sets: str) -> Plan:
    """Return a plan on GPUs."""
    return load_job("llama3-8b-zero3", sets).plan


def test_a_plan_on_gpus_is_predicted_with_its_kernels() -> None:
    fused, plain = (
        cost_inputs_from_plan(one).software for one in (plan(), plan("kernels.provider=plain"))
    )
    assert float(fused.width_bytes) == kernel_facts(EVERY)["width_bytes"]
    assert float(plain.width_bytes) == kernel_facts(Kernels())["width_bytes"]
    assert float(fused.logit_bytes) < float(plain.logit_bytes)


def test_what_was_measured_on_a_cluster_stands() -> None:
    one = plan()
    measured = replace(one, cluster=replace(one.cluster, trainer=(("width_bytes", 77.0),)))
    assert float(cost_inputs_from_plan(measured).software.width_bytes) == 77.0


def test_a_logit_costs_what_is_counted() -> None:
    fused, plain = (recorded()[case]["ends.BW"] for case in ("llama3-8b", "llama3-8b, plain"))
    less = plain["bytes_of_memory_bound"] - fused["bytes_of_memory_bound"]
    # The last norm is plain, too: half of what both norms of a block move.
    norm = TOKENS * HIDDEN * 0.5 * (80.3 - 13.0)
    each = (less - norm) / (TOKENS * 128256)
    facts = kernel_facts(Kernels())["logit_bytes"] - kernel_facts(EVERY)["logit_bytes"]
    assert each == pytest.approx(facts, rel=0.01)
