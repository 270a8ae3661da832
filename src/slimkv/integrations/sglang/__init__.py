"""A packed KV cache inside stock SGLang: an attention backend and a KV pool, switched on by a plugin that pip installs.

SGLang keeps its scheduler, radix cache and page allocator. slimkv reports the bytes per token, holds the pages, writes
codes into them and runs attention on them.
"""
