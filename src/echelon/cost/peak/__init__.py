# SPDX-License-Identifier: Apache-2.0
"""What a rank holds at each moment of a step, and the most of it: no bound, the engine's own order.

rank_peak        the highest moment of each rank, by term; ranks that are alike share a walk
place_walk       the walk over the actions of a rank, and the states that they begin and end in
few_rounds       a step of a few rounds of the pipeline, whose peak is that of the whole one
weight_order     which gradients of weights each operator of backward writes, and which it puts off
gradient_sums    buckets that fill, copies of them on the wire, slices that are added
whole_units      parameters that are whole at stage 3, from their gather to their release
messages         what comes from other stages and goes to them
host_memory      peaks on the device and on the host, place by place
fullest_rank     weights and bytes of the fullest rank, for arrays of plans
update           what the optimizer has beside the model state
"""
