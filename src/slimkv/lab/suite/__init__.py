"""``slimkv suite``: quality, bytes and speed of a model's caches side by side, in one folder."""
