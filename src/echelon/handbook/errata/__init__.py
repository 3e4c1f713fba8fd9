# SPDX-License-Identifier: Apache-2.0
"""What published guides claim, what holds, and the functions of the product that show it.

claims.py           the claims as data: a file of claims/ for each guide
compute_claims.py   what holds of a claim, computed, and whether two values agree
memory.py, volume.py, bubble.py, other_claims.py
                    the formulas of claims, by the id of the claim
"""
