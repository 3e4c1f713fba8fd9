"""The line, the file or the batch script of a launcher says how many processes there are."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from echelon.interop.launcher import after_launcher, read_launcher


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("torchrun --nnodes=2 --nproc_per_node 8 train.py", 16),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py --x 1", 4),
        ("mpirun -np 16 -bind-to none python train.py", 16),
        ("srun -N 2 --ntasks-per-node=8 python train.py", 16),
        ("srun --nodes 2 --gres=gpu:h100:4 python train.py", 8),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed ds.json", 16),
        ("deepspeed --num_gpus=4 train.py", 4),
        ("accelerate launch --num_machines 2 --num_processes 16 train.py", 16),
        ("horovodrun -np 3 python train.py", 3),
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun python train.py --x 1", 32),
        ("N=2\nG=8\ntorchrun --nnodes $N --nproc-per-node $G train.py --a 1 --b 2", 16),
    ],
)
def test_a_line_says_it(line: str, ranks: int, tmp_path: Path) -> None:
    found = read_launcher(tmp_path / "ds.json", "{}", line)
    assert (found.ranks, found.problems) == (ranks, ())
    file = tmp_path / "launch.sh"
    file.write_text(line)
    assert read_launcher(tmp_path / "ds.json", "{}", str(file)).ranks == ranks


def test_files_say_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\nworker-1 slots=8\nworker-2 slots=4\n")
    (tmp_path / "accelerate.yaml").write_text("num_machines: 2\nnum_processes: 6\n")
    here = tmp_path / "ds.json"
    assert read_launcher(here, "{}", str(tmp_path / "hosts")).ranks == 12
    assert read_launcher(here, "{}", str(tmp_path / "accelerate.yaml")).ranks == 6
    (tmp_path / "run.sh").write_text("deepspeed --hostfile hosts train.py")
    assert read_launcher(here, "{}", str(tmp_path / "run.sh")).ranks == 12


def test_a_line_that_counts_nothing_is_refused(tmp_path: Path) -> None:
    for line in ("python train.py", "torchrun train.py", "mpirun python train.py"):
        found = read_launcher(tmp_path / "ds.json", "{}", line)
        assert [problem.rule for problem in found.problems] == ["import-ranks"], line


def test_the_flags_of_other_launchers_are_none_of_the_tool(tmp_path: Path) -> None:
    words = shlex.split("srun -N 2 --ntasks-per-node 4 python train.py --lr 1")
    assert after_launcher(words)[-2:] == ["--lr", "1"]
    assert "--ntasks-per-node" not in after_launcher(words)
    own = shlex.split("srun -N 2 torchrun --nproc-per-node 4 train.py --lr 1")
    assert after_launcher(own)[0] == "torchrun"
    text = "srun -N 2 --ntasks-per-node 4 python train.py --micro-batch-size 1"
    found = read_launcher(tmp_path / "run.sh", text, None)
    assert found.ranks == 8
    assert found.rows[0].key == "(launcher)"
