"""Names that SGLang's processes agree on. Light, since every one of them imports it."""

from __future__ import annotations

BACKEND = "slimkv"  # of the attention backend
LISTENING = "SLIMKV_SGLANG_LISTENS"  # in the environment while ``slimkv calibrate`` runs an engine
