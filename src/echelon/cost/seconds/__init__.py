# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, the only model of them: over numbers or arrays, fitted to published runs.

Every quantity is a number or an array; arrays of one call have one shape, so a formula serves one
plan, a search of millions of plans of one model, and a table of runs of different models alike.

    from_plan           a Plan and its Cluster as the numbers of `cost/inputs/`
    trainers            constants of trainers by generation (fitted_trainers.toml), memory they hold
    kernels             FLOPs of a token, one product, one operator, the roofline of a kernel, rates
                        that our kernels were measured to reach (measured_kernels.toml)
    collectives         one collective; the algorithm of sums that "auto" means
    exchanges           rows that a block sends, and how much of their travel shows
    block               a block and the ends of a model
    data                gradients, gathers, updates, and outer steps of local SGD
    step                a step, by term
    unit_times          a plan's embedding, blocks and head: what stages are cut and drawn by
    stages              cuts of a model into stages, and a step of a pipeline event by event
    interruptions       time that a long run loses to interruptions, and to a plan that does not fit
"""
