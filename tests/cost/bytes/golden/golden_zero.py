"""Facts about the memory of ZeRO that tutorials state, and how our formulas give them.

Each has the id under which it was checked by hand; `correct` is what holds (a tutorial may have
said something else), `ours` what the product computes. psi is a number of weights, N of data ranks;
GB is 10^9 bytes. Where a claim names no N, the fact has the values for several.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.mesh import Mesh
from echelon.core.plan import DTYPE_BYTES, ZeroStage
from echelon.cost.bytes.model_sizes import (
    FP32_PRECISION,
    MIXED_PRECISION,
    STAGES,
    cheapest_stage,
    degree_for,
    largest_model,
    memory_saving,
    model_states,
)

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Hold one checked fact and the function that must give it."""

    id: str
    claim: str
    correct: object
    ours: Callable[[], object]


def held(psi: float, stage: ZeroStage, degree: float) -> float:
    """Return the bytes of model state of a rank, in mixed precision."""
    return model_states(psi, stage, degree).total


def bars(degree: float) -> list[float]:
    """Return the bytes a weight at each stage."""
    return [held(1, stage, degree) for stage in STAGES]


def stored(psi: float, degree: int) -> tuple[float, ...]:
    """Return the weights that all ranks store, in 1e9, the redundant ones, and both over psi."""
    every = degree * model_states(psi, 0, degree).parameters / MIXED_PRECISION.parameters
    return every / GB, (every - psi) / GB, (every - psi) / psi, every / psi


MEMORY = (
    Fact(
        id="002-31",
        claim="70B over tp 8 x pp 4, no ZeRO: GB a rank",
        correct=35.0,
        ours=lambda: held(70e9 / (8 * 4), 0, 1) / GB,
    ),
    Fact(
        id="002-32",
        claim="mixed-precision Adam: 2 + 2 + 12",
        correct=[2, 2, 12, 16],
        ours=lambda: [
            MIXED_PRECISION.parameters,
            MIXED_PRECISION.gradients,
            MIXED_PRECISION.optimizer,
            MIXED_PRECISION.total,
        ],
    ),
    Fact(
        id="002-33",
        claim="bars of the figure are for N = 4",
        correct=[16, 7.0, 5.5, 4.0],
        ours=lambda: bars(4),
    ),
    Fact(
        id="002-34",
        claim="ZeRO-1 at N = 4, 8, 16, 64 and without end",
        correct=[7.0, 5.5, 4.75, 4.1875, 4.0],
        ours=lambda: [held(1, 1, degree) for degree in (4, 8, 16, 64, inf)],
    ),
    Fact(
        id="002-35",
        claim="2.5 psi is 6.4x less, at N = 28; 8x is a limit",
        correct=[6.4, 8.0],
        ours=lambda: [memory_saving(2, 28), memory_saving(2, inf)],
    ),
    Fact(
        id="002-36", claim="1 psi at stage 3 needs N = 16", correct=1.0, ours=lambda: held(1, 3, 16)
    ),
    Fact(
        id="002-37",
        claim="4, 2.5 and 1 psi need another N each",
        correct=[None, 28.0, 16.0, [16, 4.75, 2.875, 1.0], [16, 4.1875, 2.21875, 0.25]],
        ours=lambda: [
            degree_for(4, 1),
            degree_for(2.5, 2),
            degree_for(1, 3),
            bars(16),
            bars(64),
        ],
    ),
    Fact(id="002-40", claim="8x larger at N = 8", correct=8, ours=lambda: memory_saving(3, 8)),
    Fact(
        id="002-42",
        claim="mixed precision does not halve model state",
        correct=1.0,
        ours=lambda: MIXED_PRECISION.total / FP32_PRECISION.total,
    ),
    Fact(
        id="002-44",
        claim="7B on four ranks: GB at stage 3, which 40 GB hold",
        correct=[28.0, 3],
        ours=lambda: [held(7e9, 3, 4) / GB, cheapest_stage(7e9, 30 * GB, 4)],
    ),
    Fact(
        id="002-46",
        claim="weights of 70B over 8 tensor ranks: GB",
        correct=17.5,
        ours=lambda: model_states(70e9 / 8, 0, 1).parameters / GB,
    ),
    Fact(
        id="002-47",
        claim="ZeRO-2 with the optimizer offloaded, N = 8: most weights, in 1e9",
        correct=[14.2, 7.1],
        ours=lambda: [
            round(largest_model(memory * GB, 2, 8, optimizer_offload=True) / GB, 1)
            for memory in (32, 16)
        ],
    ),
    Fact(
        id="002-50",
        claim="100x larger needs N = 100",
        correct=100,
        ours=lambda: largest_model(80 * GB, 3, 100) / largest_model(80 * GB, 0, 1),
    ),
    Fact(
        id="003-04",
        claim="ZeRO-1: optimizer state N-fold less, the total up to 4x",
        correct=[[4, 64], [2.286, 3.821]],
        ours=lambda: [
            [12 / model_states(1, 1, degree).optimizer for degree in (4, 64)],
            [memory_saving(1, degree) for degree in (4, 64)],
        ],
    ),
    Fact(
        id="003-05",
        claim="ZeRO-2: gradients and optimizer N-fold less, the total up to 8x",
        correct=[[4, 64], [2.909, 7.211]],
        ours=lambda: [
            [14 / (held(1, 2, degree) - 2) for degree in (4, 64)],
            [memory_saving(2, degree) for degree in (4, 64)],
        ],
    ),
    Fact(
        id="003-06",
        claim="ZeRO-3 is N-fold",
        correct=[4, 64],
        ours=lambda: [memory_saving(3, degree) for degree in (4, 64)],
    ),
    Fact(
        id="003-16",
        claim="7B on four ranks: 28B stored, 21B of them again",
        correct=[28, 21, 3, 4],
        ours=lambda: [*stored(7e9, 4)],
    ),
    Fact(
        id="003-17",
        claim="a shard of 7B over 4",
        correct=1.75,
        ours=lambda: model_states(7e9, 3, 4).parameters / MIXED_PRECISION.parameters / GB,
    ),
    Fact(
        id="003-18",
        claim="a Python float is fp64, not fp32",
        correct=[64, 64],
        ours=lambda: [DTYPE_BYTES["fp64"] * 8, array("d").itemsize * 8],
    ),
    Fact(
        id="003-19",
        claim="7B in fp32: GB of one buffer, of three",
        correct=[28, 84],
        ours=lambda: [MIXED_PRECISION.master * 7, model_states(7e9, 0, 1).optimizer / GB],
    ),
    Fact(
        id="003-20",
        claim="Adam keeps two buffers, mixed precision a third; fp32 takes 4 + 4 + 8",
        correct=[2, 4, 16],
        ours=lambda: [len(OPTIMIZERS["adamw"].state), MIXED_PRECISION.master, FP32_PRECISION.total],
    ),
    Fact(
        id="003-21",
        claim="112 GB in GiB",
        correct=104.31,
        ours=lambda: round(held(7e9, 0, 1) / 2**30, 2),
    ),
    Fact(
        id="003-22",
        claim="the share of optimizer state",
        correct=0.75,
        ours=lambda: MIXED_PRECISION.optimizer / MIXED_PRECISION.total,
    ),
    Fact(
        id="003-23a",
        claim="7B at N = 4, stage 1: GB, times less",
        correct=[49.0, 2.286],
        ours=lambda: [held(7e9, 1, 4) / GB, memory_saving(1, 4)],
    ),
    Fact(
        id="003-23b",
        claim="7B at N = 4, stage 2: GB, times less",
        correct=[38.5, 2.909],
        ours=lambda: [held(7e9, 2, 4) / GB, memory_saving(2, 4)],
    ),
    Fact(
        id="003-23c",
        claim="7B at N = 4, stage 3: GB, times less",
        correct=[28.0, 4.0],
        ours=lambda: [held(7e9, 3, 4) / GB, memory_saving(3, 4)],
    ),
    Fact(
        id="003-63",
        claim="8 x 4 x 16 ranks; 70B: GB without ZeRO-1 and with it",
        correct=[512, 35.0, 10.4],
        ours=lambda: [
            Mesh(tp=8, pp=4, dp_shard=16).world_size,
            held(70e9 / 32, 0, 16) / GB,
            round(held(70e9 / 32, 1, 16) / GB, 1),
        ],
    ),
    Fact(
        id="003-66",
        claim="7B at stage 2 on 1, 2, 4, 8 ranks: GB",
        correct=[112.0, 63.0, 38.5, 26.25],
        ours=lambda: [held(7e9, 2, degree) / GB for degree in (1, 2, 4, 8)],
    ),
    Fact(
        id="003-67",
        claim="70B at stage 3 on 8, 16, 64 ranks: GB",
        correct=[140.0, 70.0, 17.5],
        ours=lambda: [held(70e9, 3, degree) / GB for degree in (8, 16, 64)],
    ),
    Fact(
        id="003-68",
        claim="500B over tp 8 x pp 8, dp 8: GB without ZeRO-1 and with it",
        correct=[125.0, 42.97],
        ours=lambda: [round(held(500e9 / 64, stage, 8) / GB, 2) for stage in (0, 1)],
    ),
    Fact(
        id="003-70",
        claim="70B at stage 3 on 64 ranks: GB",
        correct=17.5,
        ours=lambda: held(70e9, 3, 64) / GB,
    ),
    Fact(
        id="004-03",
        claim="optimizer state over parameters: mixed, with the copy over fp32, fp32",
        correct=[6.0, 3.0, 2.0],
        ours=lambda: [
            MIXED_PRECISION.optimizer / MIXED_PRECISION.parameters,
            MIXED_PRECISION.optimizer / FP32_PRECISION.parameters,
            FP32_PRECISION.optimizer / FP32_PRECISION.parameters,
        ],
    ),
    Fact(
        id="X-04",
        claim="ZeRO-1: optimizer state N-fold, the total up to 4x",
        correct=[64, 4.0],
        ours=lambda: [12 / model_states(1, 1, 64).optimizer, memory_saving(1, inf)],
    ),
)
