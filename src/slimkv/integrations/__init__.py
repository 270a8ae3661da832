"""The engines that slimkv plugs into. They do not import one another."""
