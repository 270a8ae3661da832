"""Shared by the CPU backends of several operations."""
