"""The programs of examples/right that need nothing but torch are proven; planted bugs are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.examples.programs import RIGHT, TORCH, proof_of_file


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
    "hooks: what has accumulated is reduced again with each microbatch": (
        "hooks_and_handles",
        "        if last:\n"
        "            handles.append(dist.all_reduce(parameter.grad, async_op=True))",
        "        dist.all_reduce(parameter.grad)",
        ("prove-gradients", "5.weight", "summed again", "dp"),
    ),
    "hooks: clipped before the sum": (
        "hooks_and_handles",
        "            last = index == MICROBATCHES - 1\n"
        "            loss = summed_loss(model(x_BT), y_BT) / labels\n"
        "            loss.backward()\n"
        "            total += loss.detach()\n"
        "        for handle in handles:\n            handle.wait()\n        handles.clear()\n"
        "        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)\n",
        "            loss = summed_loss(model(x_BT), y_BT) / labels\n"
        "            loss.backward()\n"
        "            total += loss.detach()\n"
        "        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)\n"
        "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n",
        ("prove-gradients", "5.weight", "clipped before the sum", "dp"),
    ),
    "zero 3: a sum instead of a mean": (
        "zero3_by_hand",
        "        return piece / dist.get_world_size()",
        "        return piece",
        ("prove-gradients", "5.weight", "dp", "dp"),
    ),
    "zero 3: every rank keeps the first slice of gradients": (
        "zero3_by_hand",
        "        dist.reduce_scatter_tensor(piece, whole)\n",
        "        dist.all_reduce(whole)\n        piece.copy_(whole.chunk(2)[0])\n",
        ("verify-local-gradients", "5.weight", "shards permuted", "dp"),
    ),
    "zero 3: weights are gathered in bfloat16": (
        "zero3_by_hand",
        "(whole, piece.detach())",
        "(whole, piece.detach().bfloat16().to(piece.dtype))",
        ("prove-loss", "0", "rounded", ""),
    ),
    "tp: each rank adds the bias before the sum": (
        "tensor_parallel_by_hand",
        "        y = Reduce.apply(fn.linear(x, self.weight))\n"
        "        return y if self.bias is None else y + self.bias",
        "        return Reduce.apply(fn.linear(x, self.weight, self.bias))",
        ("prove-loss", "blocks.0.down", "bias added again", "tp"),
    ),
    "tp: gradients of sums are summed again": (
        "tensor_parallel_by_hand",
        '        """Pass the gradient on."""\n        return grads[0]',
        '        """Pass the gradient on."""\n        total = grads[0].clone()\n'
        "        dist.all_reduce(total)\n        return total",
        ("verify-local-gradients", "head.weight", "tp", "tp"),
    ),
    "pp: the newest microbatch goes back first": (
        "pipeline_by_hand",
        "self.waiting.popleft()",
        "self.waiting.pop()",
        ("verify-local-gradients", "2", "order", "pp"),
    ),
    "pp: gradients start anew with the last microbatch": (
        "pipeline_by_hand",
        "        x, out = self.waiting.popleft()\n",
        "        x, out = self.waiting.popleft()\n"
        "        if not self.waiting and not self.index:\n            self.layers.zero_grad()\n",
        ("prove-gradients", "2.down.bias", "missing part", ""),
    ),
    "ep: gradients of experts are divided, too": (
        "experts_by_hand",
        "        square = torch.stack",
        "        for p in own.values():\n            p.grad /= MESH['ep']\n"
        "        square = torch.stack",
        ("prove-gradients", "2.down_EFD", "1/ep", "ep"),
    ),
    "ep: the router is not reduced": (
        "experts_by_hand",
        "        for p in shared:\n",
        "        for p in (p for p in shared if p.shape[0] != EXPERTS):\n",
        ("prove-gradients", "2.router.weight", "missing sum", "ep"),
    ),
    "dropout: each replica draws for its own rows": (
        "compiled_recompute",
        "torch.rand(8, *x_BTD.shape[1:], generator=made)[self.rows]",
        "torch.rand(*x_BTD.shape, generator=made)",
        ("prove-loss", "blocks.0", "dropout mask", "dp"),
    ),
    "ring: gradients of keys stop one rank before their own": (
        "ring_attention_by_hand",
        "            held = pass_on(held)\n        return dq",
        "            if turn < world - 1:\n                held = pass_on(held)\n        return dq",
        ("verify-local-gradients", "blocks.1.attention.v", "shards permuted", "cp"),
    ),
}
"""For each planted bug: the program, a line, what stands there now, and what must be told."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_line_is_named(bug: str, rank_pool: RankPool, tmp_path: Path) -> None:
    name, old, new, wanted = PLANTED[bug]
    text = (RIGHT / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    for base in ("ddp", "attention"):  # some are made of these
        shutil.copy(RIGHT / f"{base}.py", tmp_path)
    file = tmp_path / f"{name}.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    told = proof_of_file(rank_pool, file).diagnosis
    assert told is not None
    assert (told.rule, told.tensor, told.factor, told.axis) == wanted, told.says
