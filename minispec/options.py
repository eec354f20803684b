"""Options that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from minispec.config import COMPILE, DEVICES, DTYPES, QUANTIZE

F = TypeVar("F", bound=Callable[..., Any])


# Far more threads than any machine has cores end in a crash inside OpenMP instead of an error.
THREADS = click.IntRange(min=1, max=512)


class NumberRange(click.FloatRange):
    """A range of floating-point numbers that NaN is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is no number", param, ctx)
        return number


class NumbersList(click.ParamType):
    """Whole numbers from 1 on, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor several with commas between", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{min(numbers)} is less than 1", param, ctx)
        return numbers


class NumberOrAuto(click.ParamType):
    """A whole number, or ``auto``."""

    name = "number or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither `auto` nor a whole number", param, ctx)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; help shows them in this order."""

    def decorate(command: F) -> F:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


def engine_options(*, target_required: bool = True) -> Callable[[F], F]:
    """Options of every command that runs an engine; they arrive as the fields of EngineConfig, and ``threads``."""
    return with_options(
        click.option(
            "--target",
            required=target_required,
            metavar="MODEL",
            help="Model to run: a pulled name, a folder, a .gguf file, or a Hugging Face id in the local cache.",
        ),
        click.option(
            "--draft",
            default="auto",
            metavar="auto|none|NAME[,NAME...]",
            help="What proposes tokens for the target to verify: ngram, suffix, layers:N (the target's own first N "
            "layers), a draft model or head, or several joined by commas. The text is the same with any.  "
            "[default: auto]",
        ),
        click.option(
            "--tree",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Shape of the trees that draft models and heads propose: a JSON list of paths of child ranks, like "
            "[[0], [0, 0], [1]].  [default: grown where it looks best]",
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            help="auto is cuda if there is a GPU.  [default: auto]",
        ),
        click.option(
            "--draft-device",
            type=click.Choice(DEVICES),
            default="auto",
            help="Where a draft model runs; auto is beside the target.  [default: auto]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="Type of weights and KV cache; auto fits the device.  [default: auto]",
        ),
        click.option(
            "--max-slots",
            type=int,
            default=8,
            metavar="N",
            help="Requests that run at once; others wait.  [default: 8]",
        ),
        click.option(
            "--max-context",
            type=int,
            metavar="N",
            help="Most tokens of one request, prompt and output together.  [default: the model's limit]",
        ),
        click.option(
            "--kv-memory",
            type=float,
            metavar="GiB",
            help="Memory of the KV cache.  [default: what full slots need, as far as memory goes]",
        ),
        click.option(
            "--prefix-cache",
            type=click.BOOL,
            default=True,
            metavar="on|off",
            help="Keep the KV of earlier texts while there is room, and read only what is new of a prompt that begins "
            "as one of them.  [default: on]",
        ),
        click.option(
            "--tree-budget",
            type=NumberOrAuto(),
            metavar="auto|N",
            default="auto",
            help="Tokens a step may verify over all slots; auto measures what pays.  [default: auto]",
        ),
        click.option(
            "--compile",
            type=click.Choice(COMPILE),
            default="auto",
            help="On a CPU: auto compiles the model's step in the background (once per machine) and uses it when it is "
            "ready, checked and faster; off runs torch as it is.  [default: auto]",
        ),
        click.option(
            "--quantize",
            type=click.Choice(QUANTIZE),
            default="none",
            help="int8 rounds the target's weights to 8 bits while loading: half the memory, and on a CPU with the "
            "compiled step 1.4 to 1.9 times the speed; without it they save memory only.  [default: none]",
        ),
        click.option(
            "--deterministic",
            is_flag=True,
            help="On a CPU: a token's numbers are the same bits whoever shares its step, drafted or not. The first "
            "start waits for the compiled step.  [default: off]",
        ),
        click.option(
            "--threads",
            type=THREADS,
            metavar="N",
            help="CPU threads of the model.  [default: one per physical core]",
        ),
    )


sampling_options = with_options(
    click.option(
        "--max-tokens", type=int, metavar="N", help="Most tokens to generate.  [default: what the context holds]"
    ),
    click.option(
        "--temperature", type=float, metavar="T", help="0 is greedy, at most 2.  [default: the model's, or 1]"
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        help="Keep the likeliest tokens up to this mass, 0 to 1.  [default: the model's, or 1]",
    ),
    click.option(
        "--top-k", type=int, metavar="K", help="Keep this many tokens; 0 is off.  [default: the model's, or 0]"
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        help="Drop tokens less likely than this share of the best, 0 to 1.  [default: the model's, or 0]",
    ),
    click.option("--seed", type=int, metavar="N", help="The same seed gives the same text.  [default: random]"),
)


prompts_option = click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Prompts to run.  [default: a set that comes with minispec]",
)
