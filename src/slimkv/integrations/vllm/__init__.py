"""A packed KV cache inside stock vLLM: an attention backend, switched on by a plugin that pip installs.

vLLM keeps its scheduler and its block manager; slimkv tells it how many bytes a token takes, writes codes into the
blocks and attends them there.
"""
