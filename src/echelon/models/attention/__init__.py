"""Attention of the queries and keys that are here, in pieces whose results merge exactly."""
