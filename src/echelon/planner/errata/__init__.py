"""What published guides claim, what holds, and the functions of the product that show it.

The claims are data (`claims/*.toml`, read by `claims.py`); `computed.py` maps ids of claims to
functions that compute what holds from the inputs of the claim, by our own formulas.
"""
