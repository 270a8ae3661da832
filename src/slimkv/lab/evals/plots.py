"""One way to make a PNG, with or without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimkv.errors import MissingDependencyError


@contextmanager
def figure(path: Path, columns: int = 1, width: float = 6.4, height: float = 4.2) -> Iterator[tuple[Any, Any]]:
    """Yields a matplotlib figure and its axes (an array if ``columns`` > 1); saves it to ``path`` afterwards."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'slimkv[eval]'") from error
    drawing = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(drawing)
    yield drawing, drawing.subplots(1, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
