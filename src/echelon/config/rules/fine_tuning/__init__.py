# SPDX-License-Identifier: Apache-2.0
"""Rules about runs that train a part of a model, beginning with weights that there are."""
