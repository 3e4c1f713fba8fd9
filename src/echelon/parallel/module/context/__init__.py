# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for any module that calls `scaled_dot_product_attention`.

attention   the call, seen in the whole module and replaced in the cut one
sequences   which positions of a batch are whose
build       `apply_context`: what is done to a module, and the check of it
"""
