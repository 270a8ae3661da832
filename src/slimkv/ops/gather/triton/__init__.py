"""Decoding tokens with Triton."""
