# SPDX-License-Identifier: Apache-2.0
"""What published guides claim, what holds, and the functions of the product that show it.

claims.py           the claims as data: a file of claims/ for each guide
memory.py           formulas of claims about memory and messages, by the id of the claim
other_claims.py     those of all other claims; the computed value, whether two values agree
"""
