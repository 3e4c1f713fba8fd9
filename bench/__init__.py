"""Echelon beside its peers: one model, one data stream, one machine, interleaved steps."""
