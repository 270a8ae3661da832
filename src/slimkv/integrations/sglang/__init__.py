"""A packed KV cache inside stock SGLang: an attention backend and a KV pool, switched on by a plugin that pip installs.

SGLang keeps its scheduler, its radix cache and its page allocator; slimkv tells it how many bytes a token takes, holds
the pages, writes codes into them and attends them there.
"""
