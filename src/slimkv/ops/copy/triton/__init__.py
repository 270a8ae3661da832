"""copy in Triton."""
