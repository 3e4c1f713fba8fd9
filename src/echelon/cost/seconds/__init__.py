# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, the only model of them: over numbers or arrays, fitted to published runs.

Every quantity is a number or an array; arrays of one call have one shape, so a formula serves one
plan, a search of millions of plans of one model, and a table of runs of different models alike.

    from_plan           a Plan and its Cluster as these numbers
    trainer_generations constants of trainers by generation (fitted_trainers.toml)
    trainer_memory      what trainers hold, by facts of their code
    matmul              one product
    links/              one collective; what a block sends, and what of it shows
    block               a block and the ends of a model
    data                gradients, gathers and updates
    step                a step, by term
    unit_times          a plan's embedding, blocks and head: what stages are cut and drawn by
    balance, events     stages, and a step of a pipeline event by event
    exposed             what a plan waits for over context and expert ranks
    flops               FLOPs of a token
    automatic_sums      the algorithm of sums that "auto" means on a cluster
    interruptions       time that a long run loses to interruptions, and to a plan that does not fit
"""
