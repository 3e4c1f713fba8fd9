"""What evens the load of experts in a Megatron-LM command."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.experts import Balance
from tests.interop.imports import Imports

DENSE = """
torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 --vocab-size 300
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 16 --lr 3e-4
    --train-iters 100 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --ffn-hidden-size 96
"""

SPARSE = f"{DENSE} --num-experts 8"


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


@pytest.mark.parametrize(
    ("more", "balance"),
    [
        ("--moe-aux-loss-coeff 1e-2", Balance(kind="aux", aux_over="microbatch")),
        (
            "--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss",
            Balance(kind="aux", aux_coefficient=1e-3, aux_over="sequence"),
        ),
        (
            "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type global_aux_loss",
            Balance(kind="aux"),
        ),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type none", Balance()),
        ("--moe-aux-loss-coeff 0 --moe-router-load-balancing-type seq_aux_loss", Balance()),
        ("--moe-z-loss-coeff 1e-3", Balance(z_coefficient=1e-3)),
        (
            "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01",
            Balance(kind="bias", bias_rate=0.01),
        ),
        ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 0", Balance()),
        (
            "--moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-4",
            Balance(kind="both", aux_coefficient=1e-4, aux_over="microbatch"),
        ),
        ("--moe-expert-capacity-factor 1.25", Balance(capacity_factor=1.25, drop="score")),
        (
            "--moe-expert-capacity-factor 2 --moe-token-drop-policy position",
            Balance(capacity_factor=2.0),
        ),
        ("--moe-expert-capacity-factor -1", Balance()),
        ("--moe-token-drop-policy probs", Balance()),
    ],
)
def test_what_evens_the_load(megatron: Imports, more: str, balance: Balance) -> None:
    assert megatron(f"{SPARSE} {more}").job.plan.mathematics.balance == balance


def test_padding_needs_a_capacity_there_too(megatron: Imports) -> None:
    padded = "--moe-pad-expert-input-to-capacity"
    assert not megatron(f"{SPARSE} {padded}").job.plan.layout.experts.padded
    plan = megatron(f"{SPARSE} {padded} --moe-expert-capacity-factor 1.5").job.plan
    assert plan.layout.experts.padded
