"""Attention of one block over long sequences, by every kind, in seconds, bytes and memory."""
