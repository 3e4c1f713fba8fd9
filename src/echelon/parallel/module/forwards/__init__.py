# SPDX-License-Identifier: Apache-2.0
"""Layers of a module that compute what their class says, in another way.

own_forward  a forward of one module, and which calls it may answer
linear       weight gradients of linear layers, in their buckets at once or put off
norms        root-mean-square norms in fewer passes over memory
"""
