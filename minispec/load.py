"""From settings to a running engine: find the folders, load the models, size the cache, measure a step."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minispec import hub, kernels
from minispec.batch import Span
from minispec.compiled import Compilation
from minispec.config import DEFAULT_MAX_CONTEXT, EngineConfig
from minispec.costs import StepCost
from minispec.drafters import build
from minispec.drafters.base import NoDrafter
from minispec.engine import Engine
from minispec.errors import ConfigError, ModelError, RequestError
from minispec.graphs import runner_for
from minispec.kv_cache import PagePool
from minispec.memory import give_back_memory
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.model.loader import check_folder
from minispec.request import SamplingParams
from minispec.runner import ModelRunner, Phase, kv_bytes_per_position, resolve_device, resolve_dtype
from minispec.sampling import Noise
from minispec.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
_TREE_TOKENS = {"cpu": 32, "cuda": 256}  # most nodes per step under `--tree-budget auto`
_STEP_TOKENS = {"cpu": 256, "cuda": 2048}
_MEASURE_SECONDS = 1.5  # after which no new round of measuring a step begins
_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def preflight(config: EngineConfig) -> None:
    """Everything that can be wrong with the settings and the model files, without reading weights.

    Raises:
        ConfigError, ModelError: with the remedy.
    """
    device = resolve_device(config.device)
    resolve_dtype(config.dtype, device)
    if config.deterministic and device.type != "cpu":
        raise ConfigError(
            "--deterministic is for models on a CPU: on a GPU libraries choose kernels, and with them the order of "
            "sums, by the number of rows. Leave it out, or use --device cpu"
        )
    folder = hub.resolve(config.target)
    model = ModelConfig.from_folder(folder)
    check_folder(folder, model)
    max_context = _max_context(config, model)
    Tokenizer.from_folder(folder)
    build.check(config.draft, folder, max_context, config.tree)
    check_kernels(device, draft_device(config, device))


def load_engine(config: EngineConfig) -> Engine:
    """Load target and draft, and measure what a step costs.

    Raises:
        ConfigError, ModelError: with the remedy.
    """
    started = time.monotonic()
    preflight(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    folder = hub.resolve(config.target)
    tokenizer = Tokenizer.from_folder(folder)
    target = Llama.load(
        folder,
        device=device,
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        deterministic=config.deterministic,
        quantize=config.quantize,
    )
    draft = build.load(config.draft, target, folder, config.tree, draft_device(config, device))

    max_context = _max_context(config, target.config)
    kv_bytes = kv_bytes_per_position(target.config, dtype) + draft.kv_bytes
    pages = _pages(config, kv_bytes, max_context, device)
    runner = runner_for(target, pages=pages, page_size=config.page_size, max_context=max_context)
    noise = Noise(runner.vocab_size, device)
    drafter = draft.make(runner, noise, pages, config.prefix_cache)
    if config.compile == "auto" and device.type == "cpu":
        drafting = [own for member in drafter.members for own in member.runners]
        compilation = Compilation([runner, *(own for own in drafting if own.device == device)], noise=noise)
        # a request that began eagerly and went on compiled would not be what it is alone
        compilation.start(wait=config.deterministic)
    eager = device.type == "cpu" and runner.compile_state.phase in (Phase.OFF, Phase.UNSUPPORTED)
    if config.quantize == "int8" and eager:
        logger.warning("int8 saves memory and costs time here: without the compiled step every step widens the weights")
    runner.prepare(config.max_slots, taps=drafter.taps)
    for member in drafter.members:
        member.prepare(config.max_slots)

    auto = config.tree_budget == "auto"
    tree_budget = _TREE_TOKENS[device.type] if config.tree_budget == "auto" else int(config.tree_budget)
    max_step_tokens = config.max_step_tokens or max(_STEP_TOKENS[device.type], config.max_slots)
    engine = Engine(
        runner,
        PagePool(pages, config.page_size if config.prefix_cache else None),
        drafter,
        noise,
        tokenizer=tokenizer,
        max_slots=config.max_slots,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        tree_budget=tree_budget,
        step_cost=measure_step_cost(runner) if auto and not isinstance(drafter, NoDrafter) else None,
        eos_ids=tokenizer.eos_ids,
        name=model_name(config.target),
        description={
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "draft": drafter.name,
            "slots": config.max_slots,
            "context": max_context,
            "kv_tokens": pages * config.page_size,
            **({"quantize": config.quantize} if config.quantize != "none" else {}),
        },
        default_params=default_params(folder),
    )
    if engine.room < max_context:
        logger.warning(
            "the KV cache holds %d tokens, fewer than the context limit of %d: longer requests are refused; "
            "--kv-memory raises what fits",
            engine.room,
            max_context,
        )
    give_back_memory()
    logger.info("%s ready in %.1f s: %s", engine.name, time.monotonic() - started, engine.description)
    return engine


def draft_device(config: EngineConfig, target: torch.device) -> torch.device:
    """Where draft models run.

    Raises:
        ConfigError: CUDA is asked for and absent, or there is no model to place.
    """
    if config.draft_device == "auto":
        return target
    try:
        device = resolve_device(config.draft_device)
    except ConfigError as error:
        raise ConfigError(str(error).replace("device", "draft-device", 2)) from None
    if device != target and not build.has_models(config.draft):
        raise ConfigError(
            f"--draft-device {config.draft_device} places a draft model, and --draft {config.draft} names none: it "
            "runs with the target; leave --draft-device out"
        )
    return device


def check_kernels(target: torch.device, draft: torch.device) -> None:
    """Whether the kernels of this process run where the models do.

    Raises:
        ConfigError: they are Triton's, which need a GPU (or its interpreter), and a model is to run on the CPU.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kernels.BACKEND != "triton" or interpreted or "cpu" not in (target.type, draft.type):
        return
    option = "--device cpu" if target.type == "cpu" else "--draft-device cpu"
    other = "" if target == draft else ", or run target and draft on the same device"
    raise ConfigError(
        f"{option}: this process runs Triton kernels, one kind for all its models, and those need a GPU. Set "
        f"MINISPEC_KERNELS=torch{other}"
    )


def model_name(target: str) -> str:
    """What a target is called in the API: its id, or the name of its folder or file."""
    path = Path(target).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return target


def default_params(folder: Path) -> dict[str, Any]:
    """The model's own sampling defaults (generation_config.json), for requests that do not say.

    ``do_sample: false`` there means greedy. Unusable values are left out with a warning.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(found, Mapping):
        return {}
    defaults = {}
    for key in _DEFAULT_KEYS:
        value = found.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{key: value})
        except RequestError as error:
            logger.warning("%s: ignoring a default: %s", path, error)
            continue
        defaults[key] = value
    if found.get("do_sample") is False:
        # greedy: what shapes a draw is void, but a penalty changes which token is the likeliest
        defaults = {key: value for key, value in defaults.items() if key == "repetition_penalty"}
        defaults["temperature"] = 0.0
    if defaults:
        logger.info("sampling defaults of the model: %s", defaults)
    return defaults


def measure_step_cost(runner: ModelRunner, context: int = 128, rounds: int = 3) -> StepCost | None:
    """Time forwards of 1 to 48 rows behind a context of ``context`` tokens; warms the kernels up on the way.

    As far as the cache has room; None if it has none to speak of. Where a forward is slow, fewer ``rounds`` do: a user
    waits for this.
    """
    started = time.perf_counter()
    positions = runner.kv.k.shape[2]
    sizes = tuple(n for n in (1, 4, 8, 12, 16, 24, 32, 48) if n <= positions)
    if len(sizes) < 3:
        return None
    context = min(context, positions - sizes[-1])
    pages = range(runner.kv.pages_for(context + sizes[-1]))
    if context:
        runner.forward([Span.chunk([0] * context, pages, 0, sample_last=True)])
    best = dict.fromkeys(sizes, float("inf"))
    for done in range(rounds):
        if done and time.perf_counter() - started > _MEASURE_SECONDS:
            break
        for n in sizes:
            # a comb, every node a child of the root, and all of them sampled, as in a verification
            bits, depths = [1 | 1 << i for i in range(n)], [min(i, 1) for i in range(n)]
            begin = time.perf_counter()
            # fetched, so that a device is done; drawing tokens is left out, which is not torch's work where it counts
            runner.forward([Span([0] * n, pages, context, depths, bits, range(n))])[:, 0].tolist()
            best[n] = min(best[n], time.perf_counter() - begin)
    cost = StepCost.fit(sizes, list(best.values()))
    logger.info("a step costs %s", ", ".join(f"{cost(n) * 1e3:.1f} ms with {n} rows" for n in sizes))
    return cost


def _max_context(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_context is None:
        return min(model.max_position, DEFAULT_MAX_CONTEXT)
    model.require_context(config.max_context)
    return config.max_context


def _pages(config: EngineConfig, kv_bytes: int, max_context: int, device: torch.device) -> int:
    """Pages per model: what max_slots full contexts need, or what memory allows at ``kv_bytes`` a position."""
    page_bytes = kv_bytes * config.page_size
    if config.kv_memory is not None:
        limit = int(config.kv_memory * GIB)
    elif device.type == "cuda":
        limit = int(torch.cuda.mem_get_info(device)[0] * 0.85)
    else:
        # A CPU maps the cache lazily, so this is a bound on what long contexts may come to use, not what is taken now.
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2
    wanted = config.max_slots * -(-max_context // config.page_size)
    pages = min(wanted, limit // page_bytes)
    if pages < 1:
        raise ConfigError(
            f"the KV cache may take {limit / MIB:.2f} MiB, but one page of {config.page_size} positions needs "
            f"{page_bytes / MIB:.2f} MiB; raise --kv-memory (which is in GiB)"
        )
    return pages
