# SPDX-License-Identifier: Apache-2.0
"""The oracle beside the models of transformers, where that is installed and has the model.

configuration.py    a plan's model -> a class of transformers and its settings, or why there is none
model.py            the model of transformers in float64, with the oracle's weights
beside.py           token losses and gradients of both, and the first part that differs
"""
