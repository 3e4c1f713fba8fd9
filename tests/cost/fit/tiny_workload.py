"""The least that every constant can be fitted to; it takes a second on any device."""

from __future__ import annotations

from echelon.cost.fit.samples import (
    KIB,
    LAUNCH_OPERATORS,
    MEMORY_OPERATORS,
    UPDATE_BYTES,
    FusedAttentionKernel,
    LaunchKernel,
    MatmulKernel,
    MemoryKernel,
    OptimizerKernel,
    Workload,
)

TINY = Workload(
    kernels=[
        *(LaunchKernel(name=name) for name in LAUNCH_OPERATORS),
        *(MatmulKernel(rows=n, depth=k, columns=64) for n in (16, 64, 128) for k in (16, 64)),
        *(
            FusedAttentionKernel(sequences=1, heads=2, length=n, head_dim=16, backward=backward)
            for n in (32, 64)
            for backward in (False, True)
        ),
        *(MemoryKernel(name=name, num_bytes=64 * KIB) for name in MEMORY_OPERATORS),
        OptimizerKernel(elements=2**12, num_bytes=UPDATE_BYTES * 2**12),
    ],
    sizes=(1 * KIB, 64 * KIB),
    window_s=0.002,
)
