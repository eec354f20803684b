"""A chat whose screen is a string, and the messages of a conversation."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from minispec.chat import Chat
from minispec.chat_backends import Usage
from minispec.request import SpeculationStats

USAGE = Usage(12, 5, SpeculationStats(steps=2, drafted=8, accepted=2, emitted=4))


def make_chat(backend: Any, *, interactive: bool = True, system: str | None = None) -> tuple[Chat, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    return Chat(backend, {}, system=system, console=console, notes=console, interactive=interactive), screen


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
