"""The experts of a Megatron-LM command: their number, choice, balance, capacity and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.interop.megatron.read_experts import first_dense_layers
from tests.interop.imports import Imports, rows_of

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


def experts_of(megatron: Imports, more: str = "") -> Experts:
    experts = megatron(f"{SPARSE} {more}").job.plan.model.experts
    assert experts is not None
    return experts


def test_what_a_command_leaves_out_is_as_megatron_has_it(megatron: Imports) -> None:
    plan = megatron(SPARSE).job.plan
    assert plan.model.experts == Experts(num_experts=8, top_k=2, ffn=96)
    assert plan.mathematics.balance == Balance()
    assert plan.layout.experts == ExpertLayout()


def test_the_experts_of_a_command(megatron: Imports) -> None:
    found = experts_of(
        megatron,
        "--moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64 "
        "--moe-layer-freq ([0]*1+[1]*3) --moe-router-score-function sigmoid "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-pre-softmax",
    )
    assert found == Experts(
        num_experts=8,
        top_k=4,
        ffn=32,
        shared_experts=2,
        first_dense_layers=1,
        router="sigmoid",
        router_bias=True,
        renormalise=True,
        gate_scale=2.5,
        groups=4,
        top_groups=2,
    )


@pytest.mark.parametrize(
    ("more", "renormalise"),
    [
        ("", True),
        ("--moe-router-pre-softmax", False),
        ("--moe-router-topk 1 --moe-router-pre-softmax", False),
        ("--moe-router-score-function sigmoid", True),
        ("--moe-router-score-function sigmoid --moe-router-topk 1", False),
    ],
)
def test_a_softmax_before_the_choice_is_not_renormalised(
    megatron: Imports, more: str, renormalise: bool
) -> None:
    assert experts_of(megatron, more).renormalise is renormalise


@pytest.mark.parametrize(
    ("more", "degrees", "expert_tp"),
    [
        ("--expert-model-parallel-size 4", (1, 4, 1, 4), 1),
        ("--expert-model-parallel-size 2", (2, 2, 1, 2), 1),
        ("--expert-model-parallel-size 2 --use-distributed-optimizer", (1, 4, 1, 2), 1),
        ("--tensor-model-parallel-size 2", (2, 1, 2, 1), 2),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2", (1, 2, 2, 2), 2),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            (2, 1, 2, 2),
            1,
        ),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1",
            (1, 2, 2, 4),
            1,
        ),
    ],
)
def test_ranks_that_share_out_experts_are_no_replicas(
    megatron: Imports, more: str, degrees: tuple[int, ...], expert_tp: int
) -> None:
    plan = megatron(f"{SPARSE} {more}").job.plan
    mesh = plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.ep) == degrees
    assert plan.layout.experts.expert_tp == expert_tp


@pytest.mark.parametrize(
    ("more", "rule", "says"),
    [
        ("--moe-router-load-balancing-type sinkhorn", "unknown-choice", "sinkhorn"),
        ("--moe-layer-freq 2", "import-not-honoured", "dense layers stand before"),
        ("--moe-layer-freq [1,0,1,1]", "import-not-honoured", "dense layers stand before"),
        ("--moe-shared-expert-intermediate-size 100", "import-not-honoured", "as wide"),
        (
            "--moe-router-topk 6 --moe-router-num-groups 2 --moe-router-group-topk 2",
            "import-not-honoured",
            "6 / 2",
        ),
        ("--moe-router-topk 1", "import-not-honoured", "a softmax over one expert is 1"),
        ("--moe-router-dtype fp64", "import-not-honoured", "router is in fp32"),
        ("--moe-input-jitter-eps 0.1", "import-not-honoured", "no setting of experts"),
        ("--expert-model-parallel-size 3", "ep-divides-experts", "8 % 3"),
    ],
)
def test_what_means_something_else_is_refused(
    megatron: Imports, more: str, rule: str, says: str
) -> None:
    found = {problem.rule: problem for problem in megatron.problems(f"{SPARSE} {more}")}
    assert rule in found
    assert says in found[rule].message


def test_flags_of_experts_count_for_nothing_without_experts(megatron: Imports) -> None:
    found = megatron(f"{DENSE} --moe-router-topk 4 --moe-aux-loss-coeff 0.01")
    assert found.job.plan.model.experts is None
    (row,) = rows_of(found, "--moe-router-topk")
    assert "there are no experts" in row.why
    refused = megatron.refused(f"{DENSE} --expert-model-parallel-size 2")
    assert refused == [("import-not-honoured", "--expert-model-parallel-size")]


def test_a_model_that_it_builds_on_keeps_what_the_command_does_not_say(megatron: Imports) -> None:
    command = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64 "
        "--seq-length 4096 --train-iters 10 --lr 1e-4 --expert-model-parallel-size 8 "
        "--moe-aux-loss-coeff 0.02 --attention-dropout 0"
    )
    found = megatron(command, extends="mixtral-8x7b", sets=["cluster.preset=8xh100"])
    plan = found.job.plan
    assert plan.model.experts == Experts(num_experts=8, top_k=2, ffn=14336)
    assert (plan.mesh.dp_shard, plan.mesh.ep) == (8, 8)
    assert plan.mathematics.balance.aux_coefficient == 0.02


@pytest.mark.parametrize(
    ("pattern", "layers", "dense"),
    [
        (1, 4, 0),
        (2, 4, None),
        (True, 4, None),
        ("([1]*4)", 4, 0),
        ("'([0]*3+[1]*58)'", 61, 3),
        ("[0]*1+[1]*3", 4, 1),
        ("[0, 0, 1, 1]", 4, 2),
        ("[0]*1+[1]*3", 5, None),
        ("[0,1]*2", 4, None),
        ("[0]*4", 4, None),
        ("__import__('os')", 4, None),
        (["[0,", "1]"], 2, None),
        ("[0]*1+[1]*3", None, 1),
    ],
)
def test_a_pattern_of_layers_is_dense_ones_first(
    pattern: object, layers: int | None, dense: int | None
) -> None:
    assert first_dense_layers(pattern, layers) == dense
