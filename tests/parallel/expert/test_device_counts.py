"""Experts whose rows only the device counts: the same numbers, and a host that reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan, Precision
from echelon.models.batch import TokenBatch
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.expert import grouped_matmul, layer
from echelon.parallel.expert.grouped_matmul import ends_of
from echelon.parallel.expert.token_dispatcher import ROWS_OF_EXPERTS, SortedAssignments
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl, rehearse
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.parallel.one_rank import alone

TOKENS, SEQUENCES = 16, 2
DROPS = Balance(capacity_factor=0.75)
FP32 = Precision(parameters="fp32", gradients="fp32", reduction="fp32", master="fp32")
BF16 = Precision(parameters="bf16")
Results = dict[str, torch.Tensor]


@dataclass(slots=True)
class Kernel:
    """The grouped product of a CPU in place of a GPU's: what no group has is not a number."""

    ends: list[torch.Tensor]
    product: Callable[..., torch.Tensor]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        self.ends.append(offs)
        made = self.product(a, b, offs=offs)
        made[int(offs[-1]) :] = torch.nan
        return made


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let experts take what a GPU takes."""
    made = Kernel([], grouped_matmul._GROUPED_MM)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(grouped_matmul, "has_grouped_kernel", lambda _: True)
    monkeypatch.setattr(grouped_matmul, "_GROUPED_MM", made)
    return made


def computed(plan: Plan) -> Results:
    """Return the output and all gradients of the last mixture of a plan, of two microbatches."""
    model, _ = alone(plan)
    mixture = cast(MixtureOfExperts, model.stages[0].layers[str(plan.model.layers - 1)].mlp)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.mathematics.precision.parameters]
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.zeros((SEQUENCES, TOKENS // SEQUENCES), dtype=torch.int64)
    batch = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.arange(SEQUENCES))
    assert model.balancer is not None
    model.store.start_step()
    model.balancer.start_step(1.0)
    found: Results = {}
    for turn in range(2):
        x, dy = (
            torch.randn(TOKENS, plan.model.hidden, generator=generator).to(dtype) for _ in range(2)
        )
        x.requires_grad_()
        model.store.start_backward(last=False)
        y = mixture(x, batch)
        y.backward(dy)
        model.store.run_deferred()
        assert x.grad is not None
        found |= {f"y{turn}": y.detach(), f"x{turn}": x.grad}
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    names = dict(mixture.named_parameters())
    return found | {name: slots[id(one)].gradient.clone() for name, one in names.items()}


@pytest.mark.parametrize("balance", [Balance(), DROPS], ids=["all", "drops"])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK], ids=lambda one: one.name)
def test_numbers_are_those_of_rows_that_the_host_counts(
    model: Any, chunks: int, balance: Balance, monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    plan = plan_of(
        model=model,
        precision=FP32,
        balance=balance,
        experts=ExpertLayout(chunks=chunks),
        microbatch_sequences=SEQUENCES,
        bucket_bytes=1 << 20,
    )
    found = computed(plan)
    # Two products forward and two back, in each chunk of each microbatch.
    assert len(kernel.ends) == 2 * 4 * chunks
    kept = [int(ends[-1]) for ends in kernel.ends]
    each = TOKENS * model.experts.top_k // chunks
    assert all(one <= each for one in kept)
    assert (min(kept) < each) == (balance is DROPS)
    with monkeypatch.context() as patch:
        patch.setattr(grouped_matmul, "has_grouped_kernel", lambda _: False)
        expected = computed(plan)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=name)
        assert value.isfinite().all()


def test_gradients_in_fp32_are_rounded_nowhere(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    wide = replace(MIXTRAL, experts=Experts(num_experts=8, top_k=2, ffn=16))  # rows of 32 bytes
    plan = plan_of(model=wide, precision=BF16, microbatch_sequences=2, bucket_bytes=1 << 20)
    found = computed(plan)
    assert len(kernel.ends) == 2 * 4
    monkeypatch.setattr(grouped_matmul, "needs_no_counts", lambda *_: False)
    monkeypatch.setattr(layer, "needs_no_counts", lambda *_: False)
    expected = computed(plan)
    for name, value in expected.items():
        if name.startswith("experts."):
            # The same products of the same bf16 numbers, added up in the same float32.
            assert torch.equal(found[name], value), name
            assert value.dtype == torch.float32
    made = found["experts.0.up.weight"]
    assert not torch.equal(made, made.bfloat16().float())


def test_rows_of_what_is_dropped_lie_behind_the_last_expert() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 2]])
    kept = torch.tensor([[True, False], [False, False], [True, True]])
    routed = layer.TokenRouting(gates_nK=torch.ones(3, 2), chosen_nK=chosen, kept_nK=kept)
    one = SortedAssignments(routed, 4)
    ends_E = one.keep_all()
    assert (ends_E.tolist(), ends_E.dtype) == ([1, 1, 3, 3], torch.int32)
    assert one.slot_S.tolist() == [4, 0, 5, 1, 2, 3]
    rows_SD = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], *[[torch.nan] * 2] * 3])
    assert one.add_up(rows_SD).tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]


def test_ends_are_those_of_runs_of_equal_numbers() -> None:
    ends = ends_of(torch.tensor([0, 0, 2, 2, 2, 3, 5, 5]), 5)
    assert (ends.tolist(), ends.dtype) == ([2, 2, 5, 6, 6], torch.int32)


def planned(*flags: str) -> Plan:
    common = ("precision.parameters=bf16", "batch.microbatch_sequences=2", "model.layers=2")
    return on_nccl(load_job("toy-experts", (*common, *flags)).plan)


ALONE = ("mesh.ep=1", "mesh.dp_shard=1")
READS = {
    "one rank": (ALONE, 0),
    "one rank, drops": ((*ALONE, "experts.capacity_factor=1.0"), 0),
    "no split of experts": (("mesh.ep=1", "mesh.dp_shard=4", "zero.stage=3"), 0),
    "split": ((), 1),
    "split, chunks": (("experts.chunks=4",), 4),
    "padded": (("experts.padded=true", "experts.capacity_factor=1.0"), 0),
    "padded, one rank": (("experts.padded=true", "experts.capacity_factor=1.0", *ALONE), 0),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", READS)
def test_the_host_reads_where_sizes_follow_from_the_routing_only(case: str) -> None:
    flags, each = READS[case]
    plan = planned(*flags)
    found = rehearse_rank(plan, 0)
    expected = {("F", ROWS_OF_EXPERTS): each * plan.model.layers * plan.num_microbatches}
    assert dict(found.reads) == ({} if not each else expected)
    rehearse(plan, workers=1).require()


def test_a_read_in_the_dispatcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = SortedAssignments.add_up

    def reads(self: SortedAssignments, rows_SD: torch.Tensor) -> torch.Tensor:
        self.slot_S[0].item()
        return add_up(self, rows_SD)

    monkeypatch.setattr(SortedAssignments, "add_up", reads)
    (fault, _) = rehearse(planned(*ALONE), workers=1).faults
    assert fault.rule.id == "rehearse-host-read"
    assert "in an action F" in fault.text
