"""At startup, unsupported settings raise errors that name them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import engine, run_engine, slimkv
from prompts import EngineError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_backend": "CUSTOM"}, "has no 'slimkv' entry"),
        ({"additional_config": {"slimkv": {}}}, "which is not switched on"),
        (slimkv("k4v4", layers={"8": "raw"}), "the model has layers 0 to 7"),
    ],
)
def test_wrong_settings_are_refused_at_start_up(arguments, message):
    with pytest.raises(EngineError, match=message):
        run_engine(engine(**arguments), [])
