"""The command line of Megatron-LM: its mesh, model and numbers; the data ranks are derived."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.plan import Context
from echelon.interop.megatron.abilities import TABLES
from tests.interop.imports import Imports, rows_of
from tests.interop.megatron.commands import small

# A tutorial's layout of a 70B model on 64 GPUs, as it stands there.
TUTORIAL = """
# Training Llama 70B on 64 H100 GPUs (8 nodes x 8 GPUs)
python train.py \\
    --tensor-model-parallel-size 8 \\    # TP=8 within node (NVLink)
    --pipeline-model-parallel-size 4 \\  # PP=4 across nodes
    --data-parallel-size 2 \\            # DP=2 for larger batches
    --micro-batch-size 1 \\
    --global-batch-size 1024 \\
    --num-layers 80 \\
    --hidden-size 8192 \\
    --num-attention-heads 64
# Total: 8 x 4 x 2 = 64 GPUs
"""

LLAMA = {"ranks": 64, "extends": "llama2-70b", "sets": ["cluster.preset=64xh100"]}


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


@pytest.mark.system("S28")
def test_the_command_of_the_tutorial(megatron: Imports) -> None:
    plan = megatron(TUTORIAL, **LLAMA).job.plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_replicate, plan.mesh.dp_shard) == (8, 4, 2, 1)
    assert plan.mesh.world_size == 64
    assert plan.num_microbatches == 512
    assert [len(stage) for stage in plan.layout.pipeline.stages] == [20] * 4
    assert plan.model.heads // plan.mesh.tp == 8
    assert plan.model.kv_heads // plan.mesh.tp == 1
    waiting = plan.mesh.pp - 1
    assert round(100 * waiting / (plan.num_microbatches + waiting), 2) == 0.58


@pytest.mark.system("S28")
def test_the_data_parallel_size_is_no_flag_but_follows_from_the_ranks(megatron: Imports) -> None:
    found = megatron(TUTORIAL, **LLAMA)
    (row,) = rows_of(found, "--data-parallel-size")
    assert row.why == "Megatron-LM has no such flag; from the ranks follow as many: 2"
    (problem,) = megatron.problems(TUTORIAL.replace("parallel-size 2", "parallel-size 4"), **LLAMA)
    assert problem.rule == "import-not-honoured"
    assert "world / (tp x pp x cp) = 64 / (8 x 4 x 1) = 2" in problem.message
    assert problem.suggestions == ("--ranks 64", "no --data-parallel-size")


def test_what_the_tutorial_leaves_out_is_asked_for_at_once(megatron: Imports) -> None:
    first, *_ = megatron.problems(TUTORIAL)
    assert first.suggestions == ("--attention-dropout 0", "--extends MODEL")
    assert {rule for rule, _ in megatron.refused(TUTORIAL)} == {"import-not-honoured"}


@pytest.mark.parametrize(
    ("more", "stage", "mesh", "resharded"),
    [
        ("", 0, (4, 1), True),
        ("--use-distributed-optimizer", 1, (1, 4), True),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 1, (2, 2), True),
        ("--use-torch-fsdp2", 3, (1, 4), True),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 3, (1, 4), False),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2, (1, 4), True),
        (
            "--use-distributed-optimizer --use-megatron-fsdp "
            "--data-parallel-sharding-strategy optim_grads_params",
            3,
            (1, 4),
            True,
        ),
    ],
)
def test_what_data_ranks_share_out(
    megatron: Imports, more: str, stage: int, mesh: tuple[int, int], resharded: bool
) -> None:
    plan = megatron(small(more)).job.plan
    assert plan.layout.zero.stage == stage
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == mesh
    assert plan.layout.zero.reshard_after_forward is resharded


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ("--lr-decay-style inverse-square-root", ["--lr-decay-style"]),
        ("--lr-decay-iters 50", ["--lr-decay-iters"]),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 20",
            ["--lr-wsd-decay-style"],
        ),
        ("--optimizer muon", ["--muon-extra-scale-factor", "--muon-use-nesterov"]),
        (
            "--optimizer muon --muon-extra-scale-factor 0.2 --muon-use-nesterov "
            "--tensor-model-parallel-size 2",
            ["--muon-tp-mode"],
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            ["--recompute-num-layers"],
        ),
        ("--num-distributed-optimizer-instances 2", ["--num-distributed-optimizer-instances"]),
        ("--grad-reduce-in-bf16", ["--grad-reduce-in-bf16"]),
        ("--moe-latent-size 16", ["--moe-latent-size"]),
    ],
)
def test_what_is_not_honoured_is_named(megatron: Imports, more: str, places: list[str]) -> None:
    refused = megatron.refused(small(more))
    assert refused == [("import-not-honoured", place) for place in places]


def test_sequence_parallel_is_cut_over_tensor_ranks_only(megatron: Imports) -> None:
    flags = "--sequence-parallel --tensor-model-parallel-size"
    assert megatron(small(f"{flags} 2")).job.plan.layout.sequence_parallel
    assert not megatron(small(f"{flags} 1")).job.plan.layout.sequence_parallel


@pytest.mark.parametrize(
    ("more", "context"),
    [
        ("", Context()),
        ("--cp-comm-type p2p", Context(kind="ring")),
        ("--cp-comm-type allgather", Context(kind="gathered")),
        ("--cp-comm-type all_gather", Context(kind="gathered")),
        ("--cp-comm-type a2a", Context(kind="ulysses", ulysses_degree=4)),
        ("--cp-comm-type a2a+p2p", Context(kind="ulysses-ring", ulysses_degree=2)),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            Context(kind="ulysses-ring", ulysses_degree=2),
        ),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4",
            Context(kind="ulysses-ring", ulysses_degree=1),
        ),
    ],
)
def test_how_context_ranks_meet(megatron: Imports, more: str, context: Context) -> None:
    command = small(f"--context-parallel-size 4 --ddp-bucket-size 1000 {more}")
    plan = megatron(command).job.plan
    assert (plan.mesh.cp, plan.mesh.dp, plan.layout.context) == (4, 1, context)
    assert plan.layout.zero.bucket_bytes == 4000
    whole = megatron(small(more)).job.plan.layout
    assert (whole.mesh.cp, whole.context) == (1, Context())


@pytest.mark.parametrize("sizes", ["4", "2 4", "2 2 1", "a b"])
def test_sizes_of_two_levels_are_refused_where_they_are_not_cp(
    megatron: Imports, sizes: str
) -> None:
    flag = "--hierarchical-context-parallel-sizes"
    command = small(f"--context-parallel-size 4 --cp-comm-type a2a+p2p {flag} {sizes}")
    assert megatron.refused(command) == [("import-not-honoured", flag)]


def test_a_mask_that_is_reset_keeps_documents_apart(megatron: Imports) -> None:
    reset, unmade = "--reset-attention-mask", "--no-create-attention-mask-in-dataloader"
    found = megatron(small(reset))
    assert found.job.plan.mathematics.documents == "separate"
    (row,) = rows_of(found, reset)
    assert (row.setting, row.value) == ("batch.documents", "separate")
    assert megatron(small("")).job.plan.mathematics.documents == "joined"
    found = megatron(small(f"{reset} {unmade}"))
    assert found.job.plan.mathematics.documents == "joined"
    (row,) = rows_of(found, reset)
    assert (row.setting, unmade in row.why) == ("", True)
    refused = megatron.refused(small(f"{reset} --reset-position-ids"))
    assert refused == [("import-not-honoured", "--reset-position-ids")]


def test_the_ranks_of_the_launcher(megatron: Imports) -> None:
    command = small(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8"
    ).replace("--nnodes 1", "--nnodes 2")
    assert megatron(command).job.plan.mesh.dp_replicate == 2
    (problem,) = megatron.problems(command, ranks=4)
    assert problem.rule == "import-conflict"
    (problem,) = megatron.problems(small("--tensor-model-parallel-size 3"))
    assert (problem.rule, problem.suggestions) == ("import-ranks", ("3", "6"))
    sets = ["cluster.preset=8xh100"]
    assert megatron(small("", "--nproc-per-node"), sets=sets).job.plan.mesh.dp_replicate == 8


@pytest.mark.system("S28")
def test_a_misspelt_flag_names_the_nearest(megatron: Imports) -> None:
    (problem,) = megatron.problems(small("--sequence-paralel"))
    assert (problem.rule, problem.suggestions[0]) == ("import-unknown-key", "--sequence-parallel")


RULES = {
    **TABLES.keys["rest"],
    **{f"{prefix}x": rule for prefix, rule in TABLES.keys["prefixes"].items()},
}
HONOURED = [key for key, rule in RULES.items() if rule.only is None and not rule.refused]


def test_a_flag_without_need_is_said_so_with_the_reason(megatron: Imports) -> None:
    found = megatron(small(" ".join(HONOURED)))
    for key in HONOURED:
        (row,) = rows_of(found, key)
        assert (row.setting, row.why) == ("", RULES[key].why)


def test_a_flag_that_is_not_honoured_is_refused_with_the_reason(megatron: Imports) -> None:
    refused = [key for key in RULES if key not in HONOURED]
    problems = megatron.problems(small(" ".join(f"{key} 77" for key in refused)))
    assert [one.set_by.rpartition(": ")[2] for one in problems] == refused
    for key, problem in zip(refused, problems, strict=True):
        assert problem.rule == "import-not-honoured"
        assert RULES[key].why in problem.message
