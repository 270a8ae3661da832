"""Pieces that several Triton kernels share."""
