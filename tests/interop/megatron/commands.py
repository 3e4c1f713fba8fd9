"""A small command of Megatron-LM, for tests."""

from __future__ import annotations

SMALL = """
torchrun --nproc-per-node 4 --nnodes 1 pretrain_gpt.py
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 64 --vocab-size 300 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --lr 3e-4 --train-iters 100
"""


def small(more: str = "", *without: str) -> str:
    """Return a command of four ranks that names its whole model."""
    words = " ".join(SMALL.split())
    for flag in without:
        start = words.index(flag)
        end = words.find(" --", start + 1)
        words = words[:start] + (words[end + 1 :] if end > 0 else "")
    return f"{words} {more}"
