"""A plugin that lets SGLang's ``torch_native`` backend draft chains of tokens; SGLang's own CPU drafts need AMX."""

from __future__ import annotations

import copy
from typing import Any


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class DraftStep(TorchNativeAttnBackend):
        """Decodes one draft token after ``step`` drafted ones."""

        def __init__(self, runner: Any, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
            longer = copy.copy(batch)
            longer.seq_lens = batch.seq_lens + self.step + 1
            return super().forward_decode(q, k, v, layer, longer, save_kv_cache)

    class DraftSteps:
        """One backend per draft step except the last, whose token no further step attends to."""

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [DraftStep(runner, step) for step in range(steps - 1)]

        def init_forward_metadata(self, batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    DraftBackendFactory.create_decode_backend = lambda self: DraftSteps(
        self.draft_model_runner, self.speculative_num_steps
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(self.draft_model_runner)
