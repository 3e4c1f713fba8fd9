"""The flags of Megatron-LM that change numbers: batch, precision, optimizer, learning rate."""

from __future__ import annotations

from echelon.core.plan import Optimizer, Plan, Precision
from echelon.planner.export.forms import product_for

STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


def number_flags(plan: Plan) -> dict[str, object]:
    """Return the flags of a plan that change numbers, but for those of the model."""
    numbers = plan.mathematics
    flags: dict[str, object] = {
        "--micro-batch-size": plan.layout.microbatch_sequences,
        "--global-batch-size": numbers.global_sequences,
        "--seq-length": numbers.sequence_length,
    }
    if numbers.documents == "separate":
        flags["--reset-attention-mask"] = True
    flags |= _precision_flags(numbers.precision)
    return flags | _optimizer_flags(numbers.optimizer) | _rate_flags(numbers.optimizer)


def _precision_flags(precision: Precision) -> dict[str, object]:
    flags: dict[str, object] = {}
    half, gradients = precision.parameters, precision.gradients
    if half in ("bf16", "fp16"):
        flags[f"--{half}"] = True
    if half in ("bf16", "fp16") and gradients == "fp32":
        flags["--accumulate-allreduce-grads-in-fp32"] = True
    if half == gradients == "bf16":
        flags["--grad-reduce-in-bf16"] = True
    if precision.loss_scaling == "fixed":
        flags["--loss-scale"] = precision.loss_scale
    elif precision.loss_scaling == "dynamic":
        flags |= {
            "--initial-loss-scale": precision.loss_scale,
            "--min-loss-scale": precision.loss_scale_min,
            "--loss-scale-window": precision.loss_scale_window,
            "--hysteresis": precision.loss_scale_hysteresis,
        }
    return flags


def _optimizer_flags(optimizer: Optimizer) -> dict[str, object]:
    names = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
    flags: dict[str, object] = {"--optimizer": names[optimizer.kind]}
    if optimizer.kind != "sgd":
        flags |= {
            "--adam-beta1": optimizer.beta1,
            "--adam-beta2": optimizer.beta2,
            "--adam-eps": optimizer.eps,
        }
    else:
        flags["--sgd-momentum"] = optimizer.momentum
    if optimizer.kind == "muon":
        flags |= {
            "--muon-momentum": optimizer.momentum,
            "--muon-num-ns-steps": optimizer.newton_schulz_steps,
            "--muon-scale-mode": "spectral",
            "--muon-extra-scale-factor": 0.2,
            "--muon-use-nesterov": True,
            "--muon-tp-mode": "duplicated",
        }
    flags["--weight-decay"] = optimizer.weight_decay
    flags["--clip-grad"] = optimizer.clip_norm or 0.0
    return flags


def _rate_flags(optimizer: Optimizer) -> dict[str, object]:
    """Return the flags of the learning rate: it falls to the end of the run."""
    steps, peak = optimizer.total_steps, optimizer.learning_rate
    flags: dict[str, object] = {
        "--lr": peak,
        "--lr-decay-style": STYLES[optimizer.schedule],
        "--train-iters": steps,
        "--lr-decay-iters": steps,
        "--lr-warmup-iters": optimizer.warmup_steps,
    }
    if optimizer.schedule != "constant":
        flags["--min-lr"] = product_for(optimizer.final_ratio, peak)
    if optimizer.schedule == "wsd":
        flags |= {
            "--lr-wsd-decay-iters": optimizer.decay_steps,
            "--lr-wsd-decay-style": "linear",
        }
    return flags
