"""Pools of pages and their allocator."""

from slimkv.cache.allocator import BlockAllocator
from slimkv.cache.pool import PagedPool

__all__ = ["BlockAllocator", "PagedPool"]
