"""Decoding tokens on a CPU."""
