"""The terminal side of `minispec chat`: a prompt with editing, and answers that stream without garbling the screen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

# Everything a terminal might obey: C0 but tab and newline, DEL, C1.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character; cannot be encoded, hence neither printed nor sent
# A line may break at spaces and at each wide (CJK) character.
_PIECE = re.compile(r"\n|[^\S\n]+|[\u2e80-\U0003ffff]|[^\s\u2e80-\U0003ffff]+")
_HOLD = 40  # a longer "word" is shown before its end is known


def clean(text: str) -> str:
    """`text` without what a terminal would obey or could not encode."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


class StreamWriter:
    """Prints an answer as it comes, breaking lines between words; a word is shown once its end is known.

    Where the output is no terminal the text goes out as it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wrap = console.is_terminal
        self._column = 0
        self._pending = ""
        self._mid_word = False  # the start of the pending word has been shown
        self._blank = True

    def write(self, text: str) -> None:
        if self._blank:
            text = text.lstrip()  # models like to begin with a space or an empty line
            self._blank = not text
        if not self._wrap:
            self._out(text)
            return
        pieces = _PIECE.findall(self._pending + text)
        hold = pieces and not pieces[-1].isspace() and len(pieces[-1]) < _HOLD
        self._pending = pieces.pop() if hold else ""
        self._out("".join(map(self._place, pieces)))
        if pieces:
            self._mid_word = not hold and not pieces[-1].isspace()

    def finish(self) -> None:
        """Show what was held back and end the line."""
        pending, self._pending = self._pending, ""
        self._out(self._place(pending) + "\n")
        self._column, self._mid_word = 0, False

    def _place(self, piece: str) -> str:
        if piece == "\n":
            self._column = 0
            return piece
        width = self._console.width
        piece = piece.expandtabs(4)
        over = self._column + cell_len(piece) > width
        if over and self._column and not self._mid_word and piece:
            self._column = 0
            return "\n" if piece.isspace() else "\n" + self._place(piece)
        self._mid_word = False
        self._column += cell_len(piece)
        if self._column > width:  # the terminal breaks it
            self._column %= width
        return piece

    def _out(self, text: str) -> None:
        if text:
            # Anything but raw segments would expand tabs, wrap, or look for markup.
            self._console.print(Segments([Segment(text)]), end="", soft_wrap=True)


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Keep what is typed meanwhile, Ctrl-C included, from showing up in the middle of an answer; it is not lost."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    saved = termios.tcgetattr(sys.stdin)
    quiet = list(saved)
    quiet[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


class CommandCompleter(Completer):
    """Completes a command at the start of a message."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = list(commands)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for name in self._commands:
                if name.startswith(typed[1:].lower()):
                    yield Completion(f"/{name}", start_position=-len(typed))


def line_reader(commands: Iterable[str]) -> Callable[[], str]:
    """A prompt with history and editing: Enter sends, Alt-Enter starts a new line, Tab completes commands.

    It raises EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C.
    """
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # Enter in the history search keeps its meaning

    @keys.add("enter", filter=typing)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    session: PromptSession[str] = PromptSession(
        [("bold ansigreen", "> ")],
        completer=CommandCompleter(commands),
        # A drop-down menu would keep eight lines below the prompt empty.
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
    )
    return session.prompt
