# SPDX-License-Identifier: Apache-2.0
"""Layers of a module that compute what their class says, in another way.

own_forward  a forward of one module, and which calls it may answer
linear       weight gradients of linear layers, written where the buckets are
norms        root-mean-square norms in fewer passes over memory

Linear layers of a pipeline, whose weight gradients wait for W, are in `pipeline/linear.py`.
"""
