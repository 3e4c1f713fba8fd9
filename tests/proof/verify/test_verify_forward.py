"""What a program gets wrong in its forward pass, its loss or its checkpoint has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.verify.planted_programs import proof_of

LOAD = "        optimizer.load_state_dict(saved)\n"
REDUCE = "            dist.all_reduce(parameter.grad)\n"

BUGS = {
    "gradients are summed in bfloat16": (
        {
            REDUCE: "            narrow = parameter.grad.bfloat16()\n"
            "            dist.all_reduce(narrow)\n            parameter.grad.copy_(narrow)\n"
        },
        ("prove-gradients", "head.weight", "rounded sum", "dp"),
    ),
    "documents see one another": (
        {"same_TT.tril() &": "(same_TT if self.whole else same_TT | True).tril() &"},
        ("prove-loss", "v", "documents see one another", ""),
    ),
    "padding is attended to": (
        {"(token_T != PADDED)": "((token_T != PADDED) if self.whole else (token_T >= 0))"},
        ("prove-loss", "v", "padding in the softmax", ""),
    ),
    "the causal mask is lost": (
        {"same_TT.tril() &": "(same_TT.tril() if self.whole else same_TT) &"},
        ("prove-loss", "v", "causal mask", ""),
    ),
    "learned positions run on": (
        {"torch.where(token_T >= STARTS[1],": "torch.where((token_T >= STARTS[1]) & self.whole,"},
        ("prove-loss", "places", "positions not reset", ""),
    ),
    "rotations run on": (
        {
            "turn = self.positions()[:, None]": "places = self.positions() if self.whole else "
            "torch.arange(LENGTH)\n        turn = places[:, None]"
        },
        ("verify-local-gradients", "v", "positions not reset", ""),
    ),
    "dropout draws by the place of a sequence on its rank": (
        {
            "x = x + self.drop(self.up(self.norm(x)), rows)": "rows = rows if self.whole else "
            "list(range(len(rows)))\n        x = x + self.drop(self.up(self.norm(x)), rows)"
        },
        ("prove-loss", "drop", "dropout mask", "dp"),
    ),
    "the balance loss is added up": (
        {"(total + 0.1 * balance)": "(total + 0.1 * dp * balance)"},
        ("verify-local-gradients", "up.bias", "term summed", "dp"),
    ),
    "there is no balance loss": (
        {"(total + 0.1 * balance)": "(total + 0 * balance)"},
        ("verify-local-gradients", "up.bias", "term missing", ""),
    ),
    "logits are multiplied": (
        {"return self.head(x)": "return self.head(x) * (1.0 if self.whole else 2.0)"},
        ("prove-loss", "loss", "multiplier", ""),
    ),
    "a residual is multiplied": (
        {"self.o(self.attention(x))": "self.o(self.attention(x)) * (1.0 if self.whole else 0.5)"},
        ("prove-loss", "norm (input)", "multiplier", ""),
    ),
    "scores are multiplied": (
        {"attn_mask=self.mask())": "attn_mask=self.mask(), scale=None if self.whole else 1.0)"},
        ("prove-loss", "v", "multiplier", ""),
    ),
    "key heads are repeated in another order": (
        {
            "x.repeat_interleave(HEADS // KEY_HEADS, 1)": "(x.repeat_interleave(2, 1) "
            "if self.whole else x.repeat(1, 2, 1, 1))"
        },
        ("prove-loss", "v", "attention cut", ""),
    ),
    "a checkpoint has no second moments": (
        {
            LOAD: "        for state in saved['state'].values():\n            "
            f"state['exp_avg_sq'] = torch.zeros_like(state['exp_avg_sq'])\n{LOAD}"
        },
        ("verify-optimizer-state", "embed.weight", "state kinds lost", ""),
    ),
    "a checkpoint has another order of parameters": (
        {
            LOAD: "        state = saved['state']\n        if number:\n"
            f"            state[3], state[4] = state[4], state[3]\n{LOAD}"
        },
        ("verify-optimizer-state", "k.weight", "state of another", ""),
    ),
    "the schedule stands still": (
        {"        scheduler.step()\n": ""},
        ("prove-clipped-update", "embed.weight", "rate of another step", ""),
    ),
}


def test_the_right_program_is_proven(rank_pool: RankPool, tmp_path: Path) -> None:
    proof = proof_of(rank_pool, tmp_path, "attended")
    assert proof.proven, proof.diagnosis


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bug", BUGS)
def test_a_changed_line_is_named(bug: str, rank_pool: RankPool, tmp_path: Path) -> None:
    changes, wanted = BUGS[bug]
    diagnosis = proof_of(rank_pool, tmp_path, "attended", changes).diagnosis
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.tensor, diagnosis.factor, diagnosis.axis) == wanted, (
        diagnosis.says
    )
