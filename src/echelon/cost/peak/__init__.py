# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank at each moment of a step, and the most of it: no bound, the engine's own order.

rank_peak      the highest moment of each rank, by term, servers included; peaks on device and host;
               steps of few rounds, whose peak is that of the whole one; messages of stages
place_walk     the walk over the actions of a rank, and the order in which gradients are written
buckets        parameters that are whole at stage 3; gradients that fill and are summed
update         memory of the optimizer beside the model state
fullest_rank   weights and bytes of the fullest rank, for arrays of plans
"""
