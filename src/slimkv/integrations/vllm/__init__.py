"""A packed KV cache inside stock vLLM: an attention backend, switched on by a plugin that pip installs.

vLLM keeps its scheduler and block manager. slimkv reports the bytes per token, writes codes into the blocks and runs
attention on them.
"""
