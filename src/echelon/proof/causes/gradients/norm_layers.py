# SPDX-License-Identifier: Apache-2.0
"""What a wrong norm looks like: another epsilon or kind, a weight or rows that are left out.

The input of a norm is right where its output is the first that is wrong, so its formula can be
tried with other constants, and solved for its epsilon. The gradient of its weight is a sum over
tokens, so rows that are left out of it can be tried too.

Shape suffixes: n tokens of a rank, B sequences, T positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from echelon.core.plan import Plan
from echelon.models.decoder import FINAL_NORM, INPUT, OUTPUT
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.microbatch_weights import WrongGradientOfPlan
from echelon.proof.causes.token_ranks import token_rows
from echelon.proof.claims.checks import ActivationCopy
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import EXPLAINED, relative_residual
from echelon.proof.oracle.oracle import OracleStep

_FITS = 1e-9  # relative residual

_BETTER = 0.25
"""Part of an error that rounding may leave of it where it is explained."""

_STEADY = 1e-3  # relative spread of an epsilon over tokens


def explain_norm_layer(
    oracle: OracleStep, name: str, wrong: Sequence[ActivationCopy], evidence: PlanEvidence
) -> Iterator[ProofFinding]:
    """Find the formula of a norm that gives the wrong output of one."""
    read_BTD = _input_of(oracle, name)
    if read_BTD is None or not wrong:
        return
    shape, values = evidence.plan.model, oracle.before
    weight_D = values[f"{name}.weight"].double()
    bias_D = values[f"{name}.bias"].double() if f"{name}.bias" in values else None
    x_nD = torch.cat([copy.right_rows(read_BTD.double()) for copy in wrong])
    y_nD = torch.cat([copy.values_nW for copy in wrong])
    tensor = f"{name}.weight"
    formulas = {
        "RMSNorm": _rms_norm(x_nD, shape.norm_eps) * weight_D,
        "LayerNorm": _rms_norm(x_nD - x_nD.mean(-1, keepdim=True), shape.norm_eps) * weight_D,
    }
    right = "LayerNorm" if shape.norm == "layernorm" else "RMSNorm"
    for kind, made_nD in formulas.items():
        found_nD = made_nD if bias_D is None else made_nD + bias_D
        if kind != right and relative_residual(y_nD, found_nD) < _FITS:
            yield ProofFinding("norm kind", f"{kind} in place of {right}", tensor=tensor)
        if relative_residual(y_nD, made_nD / weight_D) < _FITS:
            yield ProofFinding(
                "no weight", "the norm is not multiplied by its weight", tensor=tensor
            )
    centred_nD = x_nD - x_nD.mean(-1, keepdim=True) if right == "LayerNorm" else x_nD
    plain_nD = y_nD if bias_D is None else y_nD - bias_D
    yield from _epsilon(centred_nD * weight_D, plain_nD, centred_nD, shape.norm_eps, tensor)


def _input_of(oracle: OracleStep, name: str) -> torch.Tensor | None:
    """Return what a norm reads, as far as boundaries say it."""
    right, names = oracle.activations, list(oracle.activations)
    block, _, part = name.rpartition(".")
    if name == FINAL_NORM:
        outputs = [one for one in names if one.endswith(f".{OUTPUT}")]
        return right[outputs[-1]] if outputs else None
    if part == "attention_norm":
        return right[f"{block}.{INPUT}"]
    if part == "mlp_norm":
        return right[f"{block}.{INPUT}"] + right[f"{block}.attention"]
    return None


def _rms_norm(x_nD: torch.Tensor, eps: float) -> torch.Tensor:
    return x_nD * torch.rsqrt(x_nD.square().mean(-1, keepdim=True) + eps)


def _epsilon(
    scaled_nD: torch.Tensor, y_nD: torch.Tensor, x_nD: torch.Tensor, eps: float, tensor: str
) -> Iterator[ProofFinding]:
    """Solve y = x weight / sqrt(mean(x^2) + eps) for eps, token by token."""
    factor_n = (y_nD * scaled_nD).sum(-1) / scaled_nD.square().sum(-1)
    if relative_residual(y_nD, factor_n[:, None] * scaled_nD) >= _FITS:
        return
    square_n = x_nD.square().mean(-1)
    eps_n = factor_n.pow(-2) - square_n
    found = float(eps_n.median())
    # Float64 leaves 1e-15 of the square, from which a small epsilon is solved.
    noise = 1e-12 * float(square_n.max())
    if float((eps_n - found).abs().max()) <= _STEADY * abs(found) + noise:
        says = f"its epsilon is {found:.3g} instead of {eps:.3g}"
        yield ProofFinding("epsilon", says, value=found, tensor=tensor)


def missing_rows(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find the first or last rows of each microbatch that the gradient of a norm leaves out."""
    evidence, oracle = gradient.evidence, gradient.step
    parts_BTD = parts_of_tokens(evidence, oracle, gradient.name)
    if parts_BTD is None:
        return
    right_D = parts_BTD.sum((0, 1))
    allowed = evidence.tolerance.allowed("gradients", oracle.step, gradient.name)
    row_BT, count = _rows_of_ranks(evidence.plan, parts_BTD.shape[:2])
    tried = [(0, stop) for stop in range(1, count)] + [(first, count) for first in range(1, count)]
    fits = [
        (
            _unexplained(gradient, right_D - parts_BTD[(row_BT >= first) & (row_BT < stop)].sum(0)),
            at,
        )
        for at in tried
        for first, stop in [at]
    ]
    left, (first, stop) = min(fits, default=(float("inf"), (0, 0)))
    wide = max(EXPLAINED, allowed)
    if left < wide and left < _BETTER * _unexplained(gradient, right_D):
        says = f"the parts of rows {first}:{stop} of each microbatch of a rank are missing"
        yield ProofFinding("rows missing", says, residual=left)


def parts_of_tokens(evidence: PlanEvidence, oracle: OracleStep, name: str) -> torch.Tensor | None:
    """Return what each token adds to the gradient of a norm's weight or bias; None of others."""
    site, _, part = name.rpartition(".")
    read_BTD = _input_of(oracle, site) if site in oracle.activation_gradients else None
    if read_BTD is None or oracle.skipped:
        return None
    dy_BTD, x_BTD = oracle.activation_gradients[site].double(), read_BTD.double()
    shape = evidence.plan.model
    if shape.norm == "layernorm":
        x_BTD = x_BTD - x_BTD.mean(-1, keepdim=True)
    parts_BTD = dy_BTD if part == "bias" else dy_BTD * _rms_norm(x_BTD, shape.norm_eps)
    whole_D = oracle.gradients[name].double()
    return parts_BTD if relative_residual(parts_BTD.sum((0, 1)), whole_D) < EXPLAINED else None


def _rows_of_ranks(plan: Plan, shape: torch.Size) -> tuple[torch.Tensor, int]:
    """Return which row of its rank each token is, [B, T], and how many rows a rank has."""
    row_BT = token_rows(plan).row_N.view(shape[1], shape[0]).T
    count = int(row_BT.max()) + 1
    if plan.layout.sequence_parallel:
        count //= plan.mesh.tp
        row_BT = row_BT % count
    return row_BT, count


def _unexplained(gradient: WrongGradientOfPlan, made: torch.Tensor) -> float:
    return max(
        relative_residual(piece.tensor.double(), made[piece.region]) for piece in gradient.wrong
    )
