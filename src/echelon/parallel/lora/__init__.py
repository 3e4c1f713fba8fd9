# SPDX-License-Identifier: Apache-2.0
"""LoRA on ranks: adapters beside frozen linear layers that tensor ranks may split.

adapters    what they add to outputs and input gradients, and their own gradients
"""
