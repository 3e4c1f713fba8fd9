# SPDX-License-Identifier: Apache-2.0
"""What must hold of experts: mesh.py who holds them, dispatch.py their tokens, balance.py loads."""
