"""What `echelon calibrate` measures: shapes that transformers are made of, by kind of device."""

from __future__ import annotations

from itertools import product

from echelon.cost.fit_samples import Attention, Dispatch, Move, Product, Update, Workload

UPDATE_BYTES = 28
"""Bytes that AdamW moves of an fp32 element: it reads 4 values and writes 3."""
MOVES = ("copy", "add", "norm", "softmax", "gate")
DISPATCHES = ("add", "product", "norm with gradient")
KIB, MIB = 2**10, 2**20


def cpu_workload(window_s: float) -> Workload:
    """Return what ranks on CPU cores are measured with: some 70 kernels of up to 0.3 GFLOP."""
    tall = [Product(rows=n, depth=k, columns=m) for n, k, m in _TALL]
    wide = [Product(rows=n, depth=n, columns=n) for n in (32, 64, 96, 128, 256, 384, 512)]
    odd = [Product(rows=n, depth=128, columns=m) for n, m in ((128, 257), (100, 43), (24, 129))]
    batched = [
        Product(rows=n, depth=k, columns=m, batch=b)
        for b, n, k, m in (
            (8, 128, 32, 128),
            (8, 128, 128, 32),
            (4, 256, 64, 256),
            (16, 64, 64, 64),
        )
    ]
    return Workload(
        products=(*tall, *wide, *odd, *batched),
        attention=_attention(((2, 4, 128, 32), (1, 4, 256, 32), (1, 8, 256, 64), (1, 4, 512, 64))),
        moves=_moves((64 * KIB, 1 * MIB, 16 * MIB)),
        updates=_updates((2**14, 2**17, 2**20)),
        dispatches=_dispatches(),
        sizes=tuple(4**n * KIB for n in range(9)),
        window_s=window_s,
    )


_TALL = tuple(
    (tokens, depth, columns)
    for tokens, (depth, columns) in product(
        (128, 256, 1024),
        ((128, 128), (128, 384), (512, 128), (256, 64), (64, 256), (16, 256), (256, 16)),
    )
)
"""Tokens by what a column-cut or row-cut weight of a small model has left on a rank."""


def gpu_workload(window_s: float) -> Workload:
    """Return what GPUs are measured with: some 70 kernels of up to 4 TFLOP, messages of 64 MiB."""
    tall = [
        Product(rows=tokens, depth=depth, columns=columns)
        for tokens, (depth, columns) in product(
            (1024, 4096, 8192),
            ((4096, 4096), (1024, 4096), (4096, 1024), (512, 8192), (8192, 3584), (128, 4096)),
        )
    ]
    wide = [Product(rows=n, depth=n, columns=n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    odd = [Product(rows=4096, depth=n, columns=n) for n in (1000, 2056, 4160)]
    batched = [
        Product(rows=n, depth=k, columns=m, batch=b)
        for b, n, k, m in ((32, 2048, 128, 2048), (32, 2048, 2048, 128), (8, 1024, 4096, 1792))
    ]
    return Workload(
        products=(*tall, *wide, *odd, *batched),
        attention=_attention(
            ((1, 32, 2048, 128), (1, 8, 4096, 128), (1, 8, 8192, 128), (4, 16, 1024, 64))
        ),
        moves=_moves((1 * MIB, 64 * MIB, 512 * MIB)),
        updates=_updates((2**20, 2**24, 2**27)),
        dispatches=_dispatches(),
        sizes=tuple(4**n * KIB for n in range(9)),
        window_s=window_s,
    )


def tiny_workload() -> Workload:
    """Return the least that every constant can be fitted to; it takes a second on any device."""
    return Workload(
        products=[Product(rows=n, depth=k, columns=64) for n in (16, 64, 128) for k in (16, 64)],
        attention=_attention(((1, 2, 32, 16), (1, 2, 64, 16))),
        moves=_moves((64 * KIB,)),
        updates=_updates((2**12,)),
        dispatches=_dispatches(),
        sizes=(1 * KIB, 64 * KIB),
        window_s=0.002,
    )


def _attention(shapes: tuple[tuple[int, int, int, int], ...]) -> tuple[Attention, ...]:
    return tuple(
        Attention(sequences=b, heads=h, length=t, head_dim=e, backward=back)
        for b, h, t, e in shapes
        for back in (False, True)
    )


def _moves(sizes: tuple[int, ...]) -> tuple[Move, ...]:
    return tuple(Move(name=name, num_bytes=size) for name in MOVES for size in sizes)


def _updates(sizes: tuple[int, ...]) -> tuple[Update, ...]:
    return tuple(Update(elements=n, num_bytes=UPDATE_BYTES * n) for n in sizes)


def _dispatches() -> tuple[Dispatch, ...]:
    return tuple(Dispatch(name=name) for name in DISPATCHES)
