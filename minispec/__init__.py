"""minispec: an inference server for Llama-family models with lossless tree speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minispec.llm import LLM, RequestOutput
    from minispec.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds, which `minispec --help` should not.
    if name in ("LLM", "RequestOutput"):
        from minispec import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from minispec.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
