# SPDX-License-Identifier: Apache-2.0
"""Rules that a proof of a whole run of the trainer can break."""

from echelon.core.rules import Rule

PROVE_TRAINER_STEPS = Rule(
    id="prove-trainer-steps",
    why="""
    The loop that trains reads its samples from prepared files, in an order that depends on the seed
    and the step only. A proof runs this very loop over a small text in which an epoch ends within a
    step, and compares loss, norm, rate and counts of every step with one device, which draws the
    samples by the definition of their order.
    """,
    bad="ids = permutation(epoch)[step * batch :]        # short at the end of an epoch",
    fixed="ids = sample_ids(seed=seed, step=step, ...)      # goes on with the next epoch",
)

PROVE_TRAINER_VALIDATION = Rule(
    id="prove-trainer-validation",
    why="""
    The validation loss is the mean over all held-out tokens, each counted once, with nothing
    dropped out: the number by which runs are compared. It must not depend on how ranks share the
    batches, the last of which is not full.
    """,
    bad="loss = mean(loss of each batch)                 # the last one is half empty",
    fixed="loss = sum of token losses / held-out tokens",
)

PROVE_TRAINER_RESUME = Rule(
    id="prove-trainer-resume",
    why="""
    A checkpoint holds all that the next step depends on: weights, optimizer state and its count,
    the loss scale, router biases, and where the samples stand. A run that is saved in the middle
    and resumed under another split takes the steps that the first one takes.
    """,
    bad="optimizer = AdamW(model.parameters())           # after a resume: its moments are zero",
    fixed="optimizer.load_state(checkpoint)",
)

PROVE_TRAINER_CHECKPOINT = Rule(
    id="prove-trainer-checkpoint",
    why="""
    What is read from the last checkpoint on one device, whole tensors put together from the files
    of all ranks, is what one device has trained.
    """,
    bad="torch.save(model.state_dict(), path)            # of the slices of one rank",
    fixed="save_checkpoint(folder, snapshot, ...)          # each rank its own pieces, once",
)

PROVE_TRAINER_TEXT = Rule(
    id="prove-trainer-text",
    why="""
    The model that is read from a checkpoint writes the tokens that one device writes: the same
    likeliest token after each, with nothing dropped out, and with no look beyond the start of a
    document where documents are separate.
    """,
    bad="model(tokens)                                   # in training mode",
    fixed="echelon generate RUN",
)
