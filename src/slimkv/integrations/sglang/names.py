"""Names shared by SGLang's processes; every process imports this module, so it has no dependencies."""

from __future__ import annotations

BACKEND = "slimkv"  # of the attention backend
LISTENING = "SLIMKV_SGLANG_LISTENS"  # in the environment while ``slimkv calibrate`` runs an engine
