# SPDX-License-Identifier: Apache-2.0
"""The oracle beside the models of transformers, where that is installed and has the model.

configuration.py    a plan's model -> a class of transformers and its settings, or why there is none
beside.py           that model in float64; losses and gradients of both, and where they differ
"""
