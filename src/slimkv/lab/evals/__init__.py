"""Measurements. Each is a function that returns a result dataclass."""
