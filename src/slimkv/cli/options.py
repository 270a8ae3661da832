"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimkv.cli.parsing import check_device, check_drawing, check_file, choice, count, option
from slimkv.lab import models

DEFAULT_MODEL = models.DEFAULT
_MODEL = "A packaged model, a folder, or a name on the Hugging Face hub."
Json = Annotated[bool, option("Print one JSON document instead of tables.", "--json")]
Model = Annotated[str, option(_MODEL)]
ModelArgument = Annotated[str, typer.Argument(help=_MODEL)]
Device = Annotated[str, option("auto (CUDA if available, else the CPU), cpu, cuda or cuda:1.", callback=check_device)]
Dtype = Annotated[str, choice("Data type of the weights", *models.DTYPES)]
Threads = Annotated[int | None, count("CPU threads; default: chosen by torch.", most=1024)]
Output = Annotated[Path | None, option("Also write the JSON to this file.", "--output", "-o", callback=check_file)]
Plot = Annotated[Path | None, option("Draw the result to this SVG file.", callback=check_drawing)]
Text = Annotated[str, option("A text file, a data set on the Hugging Face hub (name:config:split), or shipped.")]
CalibrationFile = Annotated[str | None, option("A calibration file, or auto; default: none.", "--calibration")]
