"""The Hugging Face Trainer over two replicas, with accumulated gradients and its own clipping.

Needs transformers and accelerate (tried with 5.23 and 1.15).
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import echelon as ec

MESH = {"dp": 2}
VOCAB, LENGTH, SEQUENCES, MICROBATCHES = 48, 16, 8, 2
CLIP_NORM, RATE = 0.5, 1e-3


def model_of(case: ec.VerifyCase) -> LlamaForCausalLM:
    """Return a small Llama with the initial values that every rank and one device share."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(case.seed)
    return LlamaForCausalLM(config).to(case.dtype)


def rows_of(step: int) -> list[dict[str, torch.Tensor]]:
    """Return the sequences of one step; they have different numbers of labels that count."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=made)
    labels_BT = tokens_BT.clone()
    for row in range(SEQUENCES):
        labels_BT[row, 4 + row :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens_BT, labels_BT, strict=True)]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of sequences."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        return model(**collate(rows_of(step))).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


class Told(TrainerCallback):
    """Keep the losses and norms that the Trainer logs."""

    def __init__(self) -> None:
        """Start with none."""
        self.steps: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **_) -> None:
        """Take what a step logged."""
        if logs and "loss" in logs:
            self.steps.append({"grad_norm": float(logs["grad_norm"])})


def trainer_of(case: ec.VerifyCase, told: Told, **changes: object) -> Trainer:
    """Return the Trainer of this rank; it shares out the rows of each step."""
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "per_device_train_batch_size": SEQUENCES // MICROBATCHES // case.world_size,
        "gradient_accumulation_steps": MICROBATCHES,
        "max_steps": case.num_steps,
        "max_grad_norm": CLIP_NORM,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        **changes,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=[row for step in range(case.num_steps) for row in rows_of(step)],
        data_collator=collate,
        optimizers=(optimizer, constant),
        callbacks=[told],
    )


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Let the Trainer run all steps."""
    told = Told()
    trainer = trainer_of(case, told)

    def run() -> list[dict[str, float]]:
        trainer.train()
        return told.steps

    return ec.OnRank(model=trainer.model, run=run, optimizer=trainer.optimizer)
