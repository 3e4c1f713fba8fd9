# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients of a rank, in flat buckets.

buckets    flat parameters and gradients, the slice of each that is the rank's own; gathers in int8
matmul     products with a weight matrix, by the faster library
gradients  where backward puts gradients
weights    initial values, and what a rank holds of each parameter
"""
