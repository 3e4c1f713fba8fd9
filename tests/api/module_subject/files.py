"""Files with factories of modules, as users write them; some with a mistake in the split."""

from __future__ import annotations

from pathlib import Path

OWN = """
import torch
from tests.parallel.module.tensor.families import OWN_RULES, Own, VOCAB, LENGTH
from tests.parallel.module.tensor import families

RULES = dict(OWN_RULES)


def make():
    def batch(step, data_rank):
        return families.batch(step, data_rank)

    def loss(model, ids):
        logits = model(ids)
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )

    return Own(), batch, loss, {"tensor": RULES}
"""

SWAPPED = OWN.replace(
    "RULES = dict(OWN_RULES)",
    'RULES = {**OWN_RULES, "blocks.*.attention.qkv": "column"}',
)
"""One matrix of q, k and v cut as if it were one layer."""

_PATCHED = OWN.replace(
    "RULES = dict(OWN_RULES)",
    "RULES = dict(OWN_RULES)\nfrom echelon.parallel.module.tensor import layers, ranks\n%s",
)

LOST_SUM = _PATCHED % "layers.SUM_ROWS = (lambda x, group, name: x.view_as(x), layers.SUM_ROWS[1])"
"""The all-reduce after row layers is lost."""

WRONG_FACTOR = _PATCHED % (
    "own = layers.SUM_GRADIENT\\n"
    "layers.SUM_GRADIENT = (own[0], lambda x, group, name: own[1](x, group, name) / group.size)"
).replace("\\n", "\n")
"""The gradient of what columns read is divided by the tensor ranks."""

UNSUMMED = _PATCHED % (
    "import echelon.parallel.module.tensor.apply as apply\n"
    "from dataclasses import replace\n"
    "own = apply.plan_split\n"
    "def lost(*args, **kwargs):\n"
    "    plan = own(*args, **kwargs)\n"
    "    return replace(plan, split=replace(plan.split, summed=frozenset()))\n"
    "apply.plan_split = lost\n"
)
"""Gradients of norms are not summed over tensor ranks."""


MOE = OWN.replace("Own(), batch", 'families.make("own_moe"), batch').replace(
    "dict(OWN_RULES)", "dict(families.EXPERT_RULES)"
)
"""A module with experts."""

UNSUMMED_GATES = MOE.replace(
    "RULES = dict(families.EXPERT_RULES)",
    "RULES = dict(families.EXPERT_RULES)\n"
    "from echelon.parallel.module.tensor import experts\n"
    "own = experts.SUM_GRADIENT\n"
    "def lost(x, group, name):\n"
    "    return x.view_as(x) if 'gates' in name else own[1](x, group, name)\n"
    "experts.SUM_GRADIENT = (own[0], lost)\n",
)
"""Each rank keeps the gradients of the gates of its own experts."""


MIXTRAL = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

RULES = {}


def make():
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        num_local_experts=4, num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config)

    def batch(step, data_rank):
        made = torch.Generator().manual_seed(100 * step + data_rank)
        return torch.randint(64, (2, 16), generator=made)

    def loss(model, ids):
        return model(input_ids=ids, labels=ids).loss

    from echelon.parallel.module.tensor.rules import rules_of

    return model, batch, loss, {"tensor": {**rules_of(model), **RULES}} if RULES else {}
"""
"""A mixture of experts of transformers, whose class says how it is split."""

WRONG_ROUTER = MIXTRAL.replace("RULES = {}", 'RULES = {"model.layers.*.mlp.gate": "summed"}')
"""Its router works on all tokens on every rank, and a rule says that it works on parts."""

WRONG_NAME = MIXTRAL.replace("RULES = {}", 'RULES = {"model.layers.*.mlp.expert": "expert"}')
"""A rule that names nothing."""


STAGED = (
    OWN.replace(
        """
    def batch(step, data_rank):
        return families.batch(step, data_rank)
""",
        """
    def batch(step, data_rank):
        ids = families.batch(step, data_rank)
        labels = ids.clone()
        labels[0, 2:] = -100
        return {"ids": ids, "labels": labels}
""",
    )
    .replace(
        'return Own(), batch, loss, {"tensor": RULES}',
        'return Placed(), batch, "causal", {"tensor": RULES, "split": "blocks"}',
    )
    .replace(
        "from tests.parallel.module.tensor import families",
        "from tests.parallel.module.composed.composed_targets import Placed\n"
        "from tests.parallel.module.tensor import families",
    )
)
"""Batches by name, and a loss that is added up over microbatches, stages and positions."""

_STAGED_PATCHED = STAGED.replace("RULES = dict(OWN_RULES)", "RULES = dict(OWN_RULES)\n%s")

LOST_MICROBATCH = _STAGED_PATCHED % (
    "from echelon.parallel.module.pipeline.stage import ModuleStage\n"
    "own = ModuleStage.__call__\n"
    "def lost(self, x, batch, *, scale=1.0):\n"
    "    out = own(self, x, batch, scale=scale)\n"
    "    wrong = self.first and batch.index == 1 and torch.is_grad_enabled()\n"
    "    return out.detach().requires_grad_() if wrong else out\n"
    "ModuleStage.__call__ = lost\n"
)
"""The first stage forgets the gradient of the second microbatch."""

SHIFTED_LABEL = _STAGED_PATCHED % (
    "from echelon.parallel.module.context import SequenceCut\n"
    "own = SequenceCut.cut\n"
    "def shifted(self, batch):\n"
    "    made = own(self, batch)\n"
    "    labels = made['labels'].clone()\n"
    "    labels[:, -1] = labels[:, 0]\n"
    "    return {**made, 'labels': labels}\n"
    "SequenceCut.cut = shifted\n"
)
"""The label of the last position of each rank is that of another token."""


def written(folder: Path, text: str) -> str:
    """Return FILE:FUNCTION of a file with this text."""
    path = folder / "own_module.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:make"
