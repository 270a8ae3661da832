"""store: K and V of new tokens -> their slots in the pages."""
