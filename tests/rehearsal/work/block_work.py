"""The work of one block, and of both ends of a model, on a GPU.

``python -m tests.rehearsal.work.block_work`` counts it anew and writes `block_work.toml`.

A block is what a model of two blocks does beyond a model of one; the ends are what is left of the
latter. Numbers are of one microbatch that is not the last to add to a gradient.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl
from echelon.rehearsal.work import Work

RECORDED = Path(__file__).with_name("block_work.toml")
BY_A_LIBRARY = (
    "mm",
    "addmm",
    "_grouped_mm",
    "grouped_weight_gradient_",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Kernels that compute more than they move, by the beginnings of their names."""

_ALONE = ("mesh.dp_shard=1", "zero.stage=0", "recompute.policy=none", "cluster.preset=1xh100")
_BATCH = ("batch.global_sequences=2", "batch.microbatch_sequences=1", "batch.sequence_length=8192")
CASES = {
    "llama3-8b": ("model.preset=llama3-8b",),
    "qwen3-8b": ("model.preset=qwen3-8b",),
    "mixtral-8x7b": ("model.preset=mixtral-8x7b",),
}
CASES |= {f"{name}, plain": (*flags, "kernels.provider=plain") for name, flags in CASES.items()}
"""Models in bf16 with 8,192 tokens of one sequence, on one GPU: with its kernels, and without."""

Counts = dict[str, int]
"""Kernels, bytes that they move, bytes of those that only move them, FLOPs."""


def counted(name: str) -> dict[str, Counts]:
    """Return the work of a case, by part and action."""
    one, two = (rehearse_rank(on_nccl(_plan(name, blocks)), 0).work for blocks in (1, 2))
    found: dict[str, Counts] = {}
    for task in ("F", "BW"):
        block = two[task].minus(one[task])
        found[f"block.{task}"] = _counts(block)
        found[f"ends.{task}"] = _counts(one[task].minus(block))
    return found


def recorded() -> dict[str, dict[str, Counts]]:
    """Return what is recorded, by case."""
    return tomllib.loads(RECORDED.read_text(encoding="utf-8"))


def _plan(name: str, blocks: int) -> Plan:
    flags = (*_ALONE, *_BATCH, *CASES[name], f"model.layers={blocks}")
    return load_job("llama3-8b-zero3", flags).plan


def _counts(work: Work) -> Counts:
    computing = sum(
        count for kernel, count in work.bytes_by_name.items() if kernel.startswith(BY_A_LIBRARY)
    )
    return {
        "kernels": work.kernels // 2,
        "bytes": work.bytes // 2,
        "bytes_of_memory_bound": (work.bytes - computing) // 2,
        "flops": work.flops // 2,
    }


def write() -> None:
    """Count all cases and write them down."""
    lines = ["# Work of a GPU: python -m tests.rehearsal.work.block_work writes this."]
    for name in CASES:
        for part, counts in counted(name).items():
            lines += ["", f'["{name}"."{part}"]', *(f"{k} = {v}" for k, v in counts.items())]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
