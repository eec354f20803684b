"""minispec: an inference server for Llama-family models with lossless tree speculative decoding."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# GNU OpenMP, which torch brings, lets its threads spin for some 10 ms after each parallel operation by default: on the
# very cores that the compiled step or another thread then wants. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

if TYPE_CHECKING:
    from minispec.constraint import OutputFormat
    from minispec.llm import LLM, RequestOutput
    from minispec.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "OutputFormat", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds, which `minispec --help` should not.
    if name in ("LLM", "RequestOutput"):
        from minispec import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from minispec.request import SamplingParams

        return SamplingParams
    if name == "OutputFormat":
        from minispec.constraint import OutputFormat

        return OutputFormat
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
