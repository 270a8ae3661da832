"""Storing tokens with Triton."""
