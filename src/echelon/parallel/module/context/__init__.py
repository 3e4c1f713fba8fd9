# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for any module that calls `scaled_dot_product_attention`.

attention   the call, seen in the whole module and replaced in the cut one
build       `apply_context`: which positions are whose, what is done to a module, the check of it
"""
