"""Engines that slimkv plugs into; siblings that never import one another."""
