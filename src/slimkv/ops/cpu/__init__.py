"""Pieces that the CPU backends of several operations share."""
