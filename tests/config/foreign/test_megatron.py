"""The command line of Megatron-LM: its mesh, model and numbers; the data ranks are derived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.config.foreign.megatron_keys import (
    NOT_NEEDED,
    NOT_NEEDED_PREFIXES,
    ONLY,
    REFUSED,
    REFUSED_PREFIXES,
)
from echelon.core.plan import Context
from tests.config.foreign.imports import Imports, rows_of

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

SMALL = """
torchrun --nproc-per-node 4 --nnodes 1 pretrain_gpt.py
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 64 --vocab-size 300 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --lr 3e-4 --train-iters 100
"""


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


def small(more: str = "", *without: str) -> str:
    """Return a command of four ranks that names its whole model."""
    words = " ".join(SMALL.split())
    for flag in without:
        start = words.index(flag)
        end = words.find(" --", start + 1)
        words = words[:start] + (words[end + 1 :] if end > 0 else "")
    return f"{words} {more}"


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


def test_the_data_parallel_size_is_no_flag_but_follows_from_the_ranks(megatron: Imports) -> None:
    found = megatron(TUTORIAL, **LLAMA)
    (row,) = rows_of(found, "--data-parallel-size")
    assert row.why == "Megatron-LM has no such flag; from the ranks follow as many: 2"
    (problem,) = megatron.problems(TUTORIAL.replace("parallel-size 2", "parallel-size 4"), **LLAMA)
    assert problem.rule == "import-not-honoured"
    assert "world / (tp x pp x cp) = 64 / (8 x 4 x 1) = 2" in problem.message
    assert problem.works == ("--ranks 64", "no --data-parallel-size")


def test_what_the_tutorial_leaves_out_is_asked_for_at_once(megatron: Imports) -> None:
    refused = megatron.refused(TUTORIAL)
    assert [rule for rule, _ in refused] == [
        "import-not-honoured",
        "import-ranks",
        "import-not-honoured",
        *["missing-setting"] * 3,
    ]
    works = [problem.works for problem in megatron.problems(TUTORIAL)]
    assert works[0] == ("--attention-dropout 0", "--extends MODEL")
    assert works[1] == ("--ranks 32", "--ranks 64")


def test_a_command_describes_its_model_with_the_defaults_of_megatron(megatron: Imports) -> None:
    found = megatron(small())
    model, plan = found.job.plan.model, found.job.plan
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (4, 64, 4, 4)
    assert (model.ffn, model.gated, model.activation) == (256, False, "gelu")
    assert (model.norm, model.positions, model.tied) == ("layernorm", "learned", True)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, True, True)
    assert model.vocab == 384
    assert (plan.mathematics.global_sequences, plan.mesh.dp_replicate) == (8, 4)
    optimizer = plan.mathematics.optimizer
    assert (optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (0.999, 0.01, 1.0)
    assert (optimizer.schedule, optimizer.final_ratio, optimizer.warmup_steps) == ("linear", 0, 0)
    assert found.job.train.steps == 100


def test_a_command_of_a_llama(megatron: Imports) -> None:
    more = (
        "--swiglu --ffn-hidden-size 96 --normalization RMSNorm --norm-epsilon 1e-6 "
        "--position-embedding-type rope --rotary-base 500000 --disable-bias-linear --add-qkv-bias "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
        "--kv-channels 32 --qk-layernorm --init-method-std 0.01 --use-rope-scaling "
        "--padded-vocab-size 320"
    )
    model = megatron(small(more)).job.plan.model
    assert (model.gated, model.activation, model.ffn, model.tied) == (True, "silu", 96, False)
    assert (model.norm, model.norm_eps, model.rope_theta) == ("rmsnorm", 1e-6, 500_000.0)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, False, False)
    assert (model.kv_heads, model.head_dim, model.qk_norm, model.vocab) == (2, 32, True, 320)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.factor, model.rope_scaling.original_positions) == (8.0, 8192)
    model = megatron(small("--swiglu --use-rotary-position-embeddings")).job.plan.model
    assert (model.ffn, model.positions) == (128, "rope")


def test_a_vocabulary_is_padded_for_the_tensor_ranks(megatron: Imports) -> None:
    plan = megatron(small("--tensor-model-parallel-size 4")).job.plan
    assert (plan.model.vocab, plan.mesh.dp_replicate) == (512, 1)
    more = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 10"
    assert megatron(small(more)).job.plan.model.vocab == 300


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
    ("more", "dtypes"),
    [
        ("", ("fp32", "fp32", "fp32")),
        ("--bf16", ("bf16", "fp32", "fp32")),
        ("--bf16 --grad-reduce-in-bf16", ("bf16", "bf16", "bf16")),
        ("--fp16", ("fp16", "fp16", "fp16")),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", ("fp16", "fp32", "fp32")),
    ],
)
def test_the_dtype_of_every_role(megatron: Imports, more: str, dtypes: tuple[str, ...]) -> None:
    precision = megatron(small(more)).job.plan.mathematics.precision
    assert (precision.parameters, precision.gradients, precision.reduction) == dtypes
    assert precision.master == "fp32"
    if "fp16" in more:
        assert (precision.loss_scaling, precision.loss_scale) == ("dynamic", 2.0**32)
        assert precision.loss_scale_hysteresis == 2


def test_the_loss_scale(megatron: Imports) -> None:
    more = "--fp16 --initial-loss-scale 65536 --loss-scale-window 200 --hysteresis 1"
    precision = megatron(small(more)).job.plan.mathematics.precision
    assert (precision.loss_scale, precision.loss_scale_window) == (65536.0, 200)
    precision = megatron(small("--fp16 --loss-scale 512")).job.plan.mathematics.precision
    assert (precision.loss_scaling, precision.loss_scale) == ("fixed", 512.0)
    assert [rule for rule, _ in megatron.refused(small("--fp16 --bf16"))] == ["import-conflict"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "--optimizer sgd --sgd-momentum 0.8 --clip-grad 0",
            {"kind": "sgd", "momentum": 0.8, "clip_norm": None},
        ),
        ("--adam-beta1 0.8 --adam-eps 1e-6", {"kind": "adamw", "beta1": 0.8, "eps": 1e-6}),
        (
            "--lr-decay-style cosine --min-lr 3e-5 --lr-warmup-iters 10 --lr-decay-iters 100",
            {"schedule": "cosine", "final_ratio": 0.1, "warmup_steps": 10},
        ),
        ("--lr-warmup-fraction 0.1", {"warmup_steps": 10}),
        ("--lr-warmup-samples 40", {"warmup_steps": 5}),
        ("--lr-decay-style constant", {"schedule": "constant"}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear",
            {"schedule": "wsd", "decay_steps": 20},
        ),
        (
            "--optimizer muon --muon-extra-scale-factor 0.2 --muon-use-nesterov "
            "--muon-num-ns-steps 6 --muon-momentum 0.95",
            {"kind": "muon", "momentum": 0.95, "newton_schulz_steps": 6},
        ),
    ],
)
def test_optimizer_and_schedule(megatron: Imports, more: str, expected: dict[str, Any]) -> None:
    optimizer = megatron(small(more)).job.plan.mathematics.optimizer
    assert {name: getattr(optimizer, name) for name in expected} == pytest.approx(expected)


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
        (
            "--data-path tokens --tokenizer-type Llama2Tokenizer",
            ["--data-path", "--tokenizer-type"],
        ),
        ("--num-distributed-optimizer-instances 2", ["--num-distributed-optimizer-instances"]),
        ("--grad-reduce-in-bf16", ["--grad-reduce-in-bf16"]),
        ("--moe-latent-size 16", ["--moe-latent-size"]),
    ],
)
def test_what_is_not_honoured_is_named(megatron: Imports, more: str, places: list[str]) -> None:
    refused = megatron.refused(small(more))
    assert refused == [("import-not-honoured", place) for place in places]


def test_stages_recompute_and_the_course_of_a_run(megatron: Imports) -> None:
    more = (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
        "--global-batch-size 16 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 4 --log-interval 10 --save-interval 50 --eval-interval 25 "
        "--eval-iters 2 --seed 7 --overlap-grad-reduce --save out"
    )
    found = megatron(small(more))
    plan, job = found.job.plan, found.job
    assert plan.layout.pipeline.stages == ((0,), (1, 2, 3))
    assert (plan.layout.recompute.policy, plan.layout.recompute.every) == ("full", 1)
    assert plan.num_microbatches == 4
    assert (job.checkpoint.every, job.train.validate_every, job.observe.log_every) == (50, 25, 10)
    assert (job.train.validation_batches, plan.mathematics.seed) == (2, 7)
    assert rows_of(found, "--save")[0].setting == ""
    refused = megatron.refused(small(more.replace("num-layers 1", "num-layers 4")))
    assert refused == [("import-not-honoured", "--decoder-first-pipeline-num-layers")]


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


@pytest.mark.parametrize("written", ["7,0", "(7,0)", "7, 0", "(7, 0)"])
def test_a_window_has_keys_before_the_query_and_its_own(megatron: Imports, written: str) -> None:
    assert megatron(small(f"--window-size '{written}'")).job.plan.model.window == 8


@pytest.mark.parametrize("written", ["-1,0", "(-1, 0)"])
def test_a_window_of_minus_one_is_none(megatron: Imports, written: str) -> None:
    assert megatron(small(f"--window-size '{written}'")).job.plan.model.window is None


@pytest.mark.parametrize("written", ["7", "-1,-1", "-2,0", "7,7", "7,-1", "all"])
def test_a_window_behind_the_query_is_refused(megatron: Imports, written: str) -> None:
    refused = megatron.refused(small(f"--window-size {written}"))
    assert refused == [("import-not-honoured", "--window-size")]


def test_data_that_the_flags_name_replaces_that_of_the_command(megatron: Imports) -> None:
    more = "--data-path tokens --tokenizer-type Llama2Tokenizer --tokenizer-model x.model"
    sets = ["data.source=stdlib", "data.tokenizer=bytes"]
    found = megatron(small(more), sets=sets)
    assert rows_of(found, "--data-path")[0].why == "data.source says what is read"


def test_the_ranks_of_the_launcher(megatron: Imports) -> None:
    command = small(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8"
    ).replace("--nnodes 1", "--nnodes 2")
    assert megatron(command).job.plan.mesh.dp_replicate == 2
    (problem,) = megatron.problems(command, ranks=4)
    assert problem.rule == "import-conflict"
    (problem,) = megatron.problems(small("--tensor-model-parallel-size 3"))
    assert (problem.rule, problem.works) == ("import-ranks", ("3", "6"))
    sets = ["cluster.preset=8xh100"]
    assert megatron(small("", "--nproc-per-node"), sets=sets).job.plan.mesh.dp_replicate == 8


def test_a_misspelt_flag_names_the_nearest(megatron: Imports) -> None:
    (problem,) = megatron.problems(small("--sequence-paralel"))
    assert (problem.rule, problem.works[0]) == ("import-unknown-key", "--sequence-parallel")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        *NOT_NEEDED.items(),
        *((f"{prefix}x", why) for prefix, why in NOT_NEEDED_PREFIXES.items()),
    ],
)
def test_a_flag_without_need_is_said_so_with_the_reason(
    megatron: Imports, key: str, why: str
) -> None:
    found = megatron(small(key))
    (row,) = rows_of(found, key)
    assert (row.setting, row.why) == ("", why)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        *REFUSED.items(),
        *((key, why) for key, (_, why) in ONLY.items()),
        *((f"{prefix}x", why) for prefix, why in REFUSED_PREFIXES.items()),
    ],
)
def test_a_flag_that_is_not_honoured_is_refused_with_the_reason(
    megatron: Imports, key: str, why: str
) -> None:
    (problem,) = megatron.problems(small(f"{key} 77"))
    assert (problem.rule, problem.set_by.endswith(f": {key}")) == ("import-not-honoured", True)
    assert why in problem.message
