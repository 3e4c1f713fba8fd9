"""The programs of examples/right that need nothing but torch are proven; planted bugs are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.examples.programs import RIGHT, proof_of_file

TORCH = (
    "ddp",
    "fsdp1",
    "fsdp2",
    "dtensor_tp_sp",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "zero1_by_hand",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ddp" else pytest.mark.slow) for name in TORCH]
)
def test_a_right_program_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = proof_of_file(rank_pool, RIGHT / f"{name}.py")
    assert proof.proven, proof.diagnosis


PLANTED = {
    "ddp: denominator of this replica": (
        "ddp",
        "        dist.all_reduce(labels)\n",
        "        labels *= MESH['dp']\n",
        ("verify-local-gradients", "5.weight", "mean of means", "dp"),
    ),
    "ddp: every microbatch as if it were the last": (
        "ddp",
        '* MESH["dp"] / labels',
        '* MESH["dp"] * MICROBATCHES / labels',
        ("prove-loss", "loss", "microbatches", ""),
    ),
    "ddp: the first microbatch is forgotten": (
        "ddp",
        "                loss.backward()\n",
        "                loss.backward()\n                last or optimizer.zero_grad()\n",
        ("prove-gradients", "5.weight", "missing part", ""),
    ),
    "fsdp2: sum instead of mean": (
        "fsdp2",
        '* MESH["dp"] / labels',
        "/ labels",
        ("prove-loss", "loss", "1/dp", "dp"),
    ),
    "fsdp2: clipped at a norm that is never reached": (
        "fsdp2",
        "clip_grad_norm_(model.parameters(), CLIP_NORM)",
        "clip_grad_norm_(model.parameters(), 2 * CLIP_NORM)",
        ("prove-gradients", "5.weight", "1/clip scale", ""),
    ),
    "fsdp2: all ranks read the same rows": (
        "fsdp2",
        '[case.mesh["dp"]] for x',
        "[0] for x",
        ("prove-loss", "loss", "same data", "dp"),
    ),
    "fsdp1: each rank divides by its own labels": (
        "fsdp1",
        "        dist.all_reduce(labels)\n",
        "",
        ("prove-loss", "loss", "mean of means", "dp"),
    ),
    "fsdp1: nobody divides by the labels": (
        "fsdp1",
        '* MESH["dp"] / labels',
        '* MESH["dp"]',
        ("prove-loss", "loss", "token count", ""),
    ),
    "tp: what is ignored is counted": (
        "dtensor_tp_sp",
        "labels = (labels_BT != IGNORED).sum()",
        "labels = (labels_BT == IGNORED).sum()",
        ("prove-loss", "loss", "token count", ""),
    ),
    "pp: what is ignored is counted": (
        "pipeline_1f1b",
        "(whole_BT != IGNORED).sum()",
        "(whole_BT == IGNORED).sum()",
        ("prove-loss", "loss", "token count", ""),
    ),
    "fsdp2: reduced after the first microbatch only": (
        "fsdp2",
        "index == MICROBATCHES - 1",
        "index != MICROBATCHES - 1",
        ("prove-gradients", "5.weight", "parts missing", ""),
    ),
    "tp: replicas are not sharded, nor reduced": (
        "dtensor_tp_sp",
        '    fully_shard(model, mesh=mesh["dp"])\n',
        "",
        ("prove-gradients", "5.weight", "missing sum", "dp"),
    ),
    "tp: labels are counted over all ranks": (
        "dtensor_tp_sp",
        'dist.all_reduce(labels, group=mesh.get_group("dp"))',
        "dist.all_reduce(labels)",
        ("prove-loss", "loss", "1/dp", "dp or tp"),
    ),
    "tp: gradients of norms are summed twice": (
        "dtensor_tp_sp",
        "        loss.backward()\n",
        "        loss.backward()\n"
        "        norms = [p for name, p in model.named_parameters() if 'norm' in name]\n"
        "        torch._foreach_mul_([p.grad for p in norms], MESH['tp'])\n",
        ("prove-gradients", "4.norm.bias", "tp", "tp"),
    ),
    "pp: each stage clips alone": (
        "pipeline_1f1b",
        '        dist.all_reduce(norm, group=mesh.get_group("pp"))\n',
        "",
        ("prove-gradients", "5.weight", "partial norm", "pp and dp"),
    ),
    "pp: replicas are not reduced": (
        "pipeline_1f1b",
        '        module = DistributedDataParallel(part, process_group=mesh.get_group("dp"))\n',
        "        module = part\n",
        ("prove-gradients", "5.weight", "missing sum", "dp"),
    ),
    "pp: another learning rate": (
        "pipeline_1f1b",
        "AdamW(parameters, lr=1e-3)",
        "AdamW(parameters, lr=3e-3)",
        ("prove-clipped-update", "0.weight", "number", ""),
    ),
    "zero 1: no replica hears of the others' gradients": (
        "zero1_by_hand",
        "        dist.all_reduce(flat)\n",
        "",
        ("prove-gradients", "5.weight", "missing sum", "dp"),
    ),
    "zero 1: each rank clips by its slice": (
        "zero1_by_hand",
        "        dist.all_reduce(square)\n",
        "",
        ("prove-gradient-norm", "gradient norm", "partial norm", "dp"),
    ),
    "zero 1: another learning rate": (
        "zero1_by_hand",
        "AdamW([self.slice], lr=lr)",
        "AdamW([self.slice], lr=3 * lr)",
        ("prove-clipped-update", "5.weight", "number", ""),
    ),
    "zero 1: another learning rate, and an optimizer of slices alone": (
        "zero1_by_hand",
        "self.inner = torch.optim.AdamW([self.slice], lr=lr)",
        "self.inner = self.optimizer = torch.optim.AdamW([self.slice], lr=3 * lr)",
        ("prove-clipped-update", "0.weight", "number", ""),
    ),
}
"""For each planted bug: the program, a line, what stands there now, and what must be told."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_line_is_named(bug: str, rank_pool: RankPool, tmp_path: Path) -> None:
    name, old, new, wanted = PLANTED[bug]
    text = (RIGHT / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    shutil.copy(RIGHT / "ddp.py", tmp_path)  # some are made of it
    file = tmp_path / f"{name}.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    told = proof_of_file(rank_pool, file).diagnosis
    assert told is not None
    assert (told.rule, told.tensor, told.factor, told.axis) == wanted, told.says
