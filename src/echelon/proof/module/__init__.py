# SPDX-License-Identifier: Apache-2.0
"""The proof of a user's own module under a plan: `echelon prove --module FILE:factory`.

subject     the module as one device trains it, and as the ranks of a plan do
wide        float64 all the way, where a module asks for float32 in between
"""
