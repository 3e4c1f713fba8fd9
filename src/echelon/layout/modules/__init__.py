# SPDX-License-Identifier: Apache-2.0
"""Who holds what of a module that is not Echelon's.

tensor      the slices of its parameters over tensor ranks, and what its layers send
stages      the buckets of the stages that a pipeline rank has of it
"""
