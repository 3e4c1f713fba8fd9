"""Documents and windows cost a GPU no kernel more than whole sequences do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.config.load import load_job
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl
from echelon.rehearsal.work import Work

RUN = (
    *("model.preset=llama3-8b", "model.layers=1", "model.vocab=1024"),
    *("mesh.dp_shard=1", "zero.stage=0", "recompute.policy=none", "batch.sequence_length=4096"),
    *("batch.global_sequences=2", "batch.microbatch_sequences=1"),
)
DOCUMENTS = tuple(range(0, 4096, 256))
SEPARATE = "batch.documents=separate"
CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {
    "documents": ((SEPARATE,), DOCUMENTS),
    "a window": (("model.window=1000",), None),
    "documents in a window": ((SEPARATE, "model.window=100"), DOCUMENTS),
    "a window beside documents that are shorter": ((SEPARATE, "model.window=300"), DOCUMENTS),
}


def work(
    flags: Sequence[str], documents: tuple[int, ...] | None = None, device: str = "h100"
) -> dict[str, Work]:
    """Return what one microbatch gives a GPU to do, by action."""
    cluster = f"cluster.preset=1x{device}"
    plan = on_nccl(load_job("llama3-8b-zero3", (*RUN, cluster, *flags)).plan)
    return dict(rehearse_rank(plan, 0, documents).work)


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_many_as_those_of_a_whole_sequence(case: str) -> None:
    flags, documents = CASES[case]
    whole, found = work(()), work(flags, documents)
    for action in ("F", "BW"):
        assert found[action].kernels == whole[action].kernels
        names = [name for name in found[action].by_name if "attention" in name]
        assert len(names) == 1
        assert names[0].startswith("_flash_attention")
    assert found["F"].flops < whole["F"].flops


def test_float32_takes_pieces() -> None:
    flags = ("precision.parameters=fp32", "model.window=1000")
    found = work(flags)["F"]
    assert found.by_name["_scaled_dot_product_efficient_attention"] > 2
    assert not any(name.startswith("_flash") for name in found.by_name)


@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
def test_cudnn_is_asked_for_squares_and_flash_for_windows(kernel: str) -> None:
    square = work((f"context.attention={kernel}",))["BW"].by_name
    assert square["_scaled_dot_product_cudnn_attention_backward"] == 2
    window = work((f"context.attention={kernel}", "model.window=1000"))["BW"].by_name
    assert window["_flash_attention_backward"] == 2
    assert not any("cudnn" in name for name in window)


def test_a_rehearsal_takes_the_kernel_of_the_clusters_generation() -> None:
    before = work((), device="a100-80gb")["F"].by_name
    assert before["_scaled_dot_product_flash_attention"] == 2
    assert not any("cudnn" in name for name in before)
