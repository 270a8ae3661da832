"""Packed pages outside a process: fingerprints of their contents, and files of prompts.

Nothing here depends on an engine; each integration reads and writes its own cache.
"""

from slimkv.wire.fingerprint import Fingerprint, LayerFingerprint
from slimkv.wire.prompt_file import LayerPages, PromptCache
from slimkv.wire.store import PromptStore, check_marker

__all__ = ["Fingerprint", "LayerFingerprint", "LayerPages", "PromptCache", "PromptStore", "check_marker"]
