"""What a module that is not Echelon's sends, beside its data ranks' gradients and parameters.

tensor      over its tensor ranks
"""
