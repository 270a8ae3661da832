"""Measurements: each a function that returns a result dataclass."""
