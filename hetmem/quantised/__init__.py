"""Quantised weights in host memory: encodes them to bytes, and decodes these."""
