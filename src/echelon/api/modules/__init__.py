# SPDX-License-Identifier: Apache-2.0
"""The proof of a user's own module under a plan.

proving     `ec.prove_module`
subject     the user's factory as a subject: on one device, and by `ec.parallelize` on ranks
"""
