"""A horovodrun command: whole replicas, batches, fused sums; what is not done is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.horovod.read import TABLES, parse_horovod
from echelon.interop.importer import detect_tool
from tests.interop.imports import Imports, rows_of, set_by

WRITTEN = """
HOROVOD_CYCLE_TIME=3 horovodrun -np 4 -H h1:2,h2:2 --fusion-threshold-mb 32 \\
    python -u train.py --fp16-allreduce --batch-size 2 --batches-per-allreduce 3 \\
    --base-lr 0.0125 --momentum 0.9 --wd 0.00005 --seed 42
"""
"""As one would start the examples of Horovod on two hosts."""

HERE = Path("run.sh")


@pytest.fixture
def horovod(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "horovod")


def command(flags: str, script: str = "") -> str:
    return f"horovodrun -np 2 {flags} python train.py {script}"


def test_what_horovod_starts(horovod: Imports) -> None:
    """S60: Horovod (A20): each flag is a setting, or says why none is needed."""
    plan = horovod(WRITTEN).job.plan
    assert (plan.mesh.dp_replicate, plan.mesh.world_size, plan.layout.zero.stage) == (4, 4, 0)
    assert plan.mathematics.global_sequences == 4 * 2 * 3
    assert (plan.layout.microbatch_sequences, plan.num_microbatches) == (2, 3)
    assert plan.layout.zero.bucket_bytes == 32 * 2**20
    assert plan.mathematics.seed == 42
    optimizer, precision = plan.mathematics.optimizer, plan.mathematics.precision
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 5e-5)
    assert optimizer.learning_rate == pytest.approx(0.0125 * 4 * 3)
    assert (optimizer.decay, optimizer.clip_norm) == ("all", None)
    assert (precision.parameters, precision.reduction) == ("fp32", "fp16")
    assert precision.loss_scaling == "dynamic"


def test_its_command_is_recognised(tmp_path: Path) -> None:
    for text in (WRITTEN, command(""), "HOROVOD_FUSION_THRESHOLD=1 mpirun -np 2 python t.py"):
        assert detect_tool(tmp_path, text) == "horovod"


def test_ranks_are_those_of_the_command_or_of_ranks(horovod: Imports) -> None:
    assert horovod(command("")).job.plan.mesh.dp_replicate == 2
    started = "mpirun --mpi-args x python train.py --batch-size 1"
    assert horovod(started, ranks=3).job.plan.mesh.dp_replicate == 3
    assert horovod.refused(command(""), ranks=3) == [("import-conflict", "--num-proc, --ranks 3")]
    found = horovod(started)
    assert found.job.plan.mesh.world_size == 1
    assert "nothing says how many are started" in found.assumptions[0]


def test_fusion_is_the_size_of_a_bucket(horovod: Imports) -> None:
    def size(flags: str, before: str = "") -> int:
        return horovod(f"{before} {command(flags)}").job.plan.layout.zero.bucket_bytes

    assert size("--fusion-threshold-mb 8") == 8 * 2**20
    assert size("", "HOROVOD_FUSION_THRESHOLD=4096") == 4096
    assert size("--fusion-threshold-mb 1", "HOROVOD_FUSION_THRESHOLD=4096") == 2**20
    assert size("--fusion-threshold-mb 0") == 1


def test_a_hierarchy_is_ours(horovod: Imports) -> None:
    flag = "--hierarchical-allreduce"
    found = horovod.problems(command(flag))
    # The rule of the engine: there must be several nodes.
    assert [one.rule for one in found] == ["hierarchy-needs-even-nodes"]
    plan = horovod(command(f"--no-{flag[2:]}")).job.plan
    assert plan.layout.collectives.algorithm == "backend"
    variable = "HOROVOD_HIERARCHICAL_ALLREDUCE"
    off = horovod(f"{variable}=0 {command('')}")
    assert set_by(off, variable) == {"collectives.algorithm": "backend"}
    both = horovod.refused(command(f"{flag} --no-{flag[2:]}"))
    assert [rule for rule, _ in both] == ["import-conflict"]


@pytest.mark.parametrize(
    ("flags", "script", "key"),
    [
        ("", "--use-adasum", "--use-adasum"),
        ("", "--gradient-predivide-factor 2.0", "--gradient-predivide-factor"),
        ("", "--epochs 90", "--epochs"),
        ("--autotune", "", "--autotune"),
        ("--min-np 2 --max-np 4", "", "--min-np"),
        ("--config-file run.yaml", "", "--config-file"),
    ],
)
def test_what_is_done_otherwise_is_refused_by_name(
    horovod: Imports, flags: str, script: str, key: str
) -> None:
    found = horovod.refused(command(flags, script))
    assert {rule for rule, _ in found} == {"import-not-honoured"}
    assert key in [place for _, place in found]


def test_unknown_flags_are_refused_with_the_nearest(horovod: Imports) -> None:
    (found,) = horovod.problems(command("--fusion-treshold-mb 8"))
    assert found.rule == "import-unknown-key"
    assert "--fusion-threshold-mb" in found.message
    assert [rule for rule, _ in horovod.refused(command("", "--my-flag 3"))] == [
        "import-unknown-key"
    ]


def test_every_flag_without_need_says_why(horovod: Imports) -> None:
    plain = [
        key
        for group in ("launcher", "script")
        for key, rule in TABLES.keys[group].items()
        if not rule.refused and rule.only is None and key.startswith("--")
    ]
    launcher = [key for key in plain if key in TABLES.keys["launcher"]]
    script = [key for key in plain if key in TABLES.keys["script"]]
    found = horovod(command(" ".join(launcher), " ".join(script)))
    told = [rows_of(found, key) for key in plain]
    assert all(rows[0].why and not rows[0].setting for rows in told)


def test_short_flags_are_the_long_ones_and_python_is_none() -> None:
    text = "HOROVOD_LOG=x horovodrun -np 4 -H a:2,b:2 -p 22 --verbose python3.11 -u t.py --lr 1e-3"
    assert parse_horovod(HERE, text) == {
        "HOROVOD_LOG": "x",
        "--num-proc": 4,
        "--hosts": "a:2,b:2",
        "--ssh-port": 22,
        "--verbose": True,
        "--lr": 0.001,
    }


def test_values_may_follow_an_equals_sign_be_several_or_negative() -> None:
    text = "horovodrun --num_proc=2 --blacklist-cooldown-range 60 300 python t.py --shift -3"
    assert parse_horovod(HERE, text) == {
        "--num-proc": 2,
        "--blacklist-cooldown-range": [60, 300],
        "--shift": -3,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("horovodrun -np 2 -np 4 python t.py", "has --num-proc twice"),
        ("horovodrun -np 2 python t.py --num-proc 3", "has --num-proc twice"),
        ("srun horovodrun -np 2 python t.py", "has 'srun'"),
        ("horovodrun python t.py", "holds no command"),
        ("horovodrun 4 -np 2 python t.py", "'4' in front of every flag"),
        ("horovodrun -np '2", "is no command"),
    ],
)
def test_what_is_no_such_command_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_horovod(HERE, text)
    assert caught.value.rules == ("import-syntax",)
    assert said in caught.value.problems[0].message
