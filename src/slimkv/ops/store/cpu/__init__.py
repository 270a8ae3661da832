"""Storing tokens on a CPU."""
