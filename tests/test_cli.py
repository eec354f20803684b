"""The command line: help is quick and complete, mistakes are answered in one line."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from safetensors.torch import load_file, save_file

from minispec import cli
from minispec.config import EngineConfig
from minispec.errors import ConfigError, ModelError
from tiny_folders import tiny_folder


def run(capsys, *args):
    """Exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return ended.value.code or 0, out, err


def test_version(capsys):
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.startswith("minispec ")


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "bench", "tune-tree", "train-draft", "pull"])
def test_every_option_explains_itself(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0 and "Usage: minispec " + command in out
    for param in cli.cli.commands[command].params:
        if isinstance(param, click.Option) and param.name != "help":
            assert param.help, param.name
            assert param.required or "[default: " in param.help or param.name in ("url", "target"), param.name


def test_help_does_not_import_torch():
    code = "import sys; sys.argv = ['minispec', 'serve', '--help']\nfrom minispec.cli import cli\n"
    code += "cli.main(standalone_mode=False)\nprint('torch' in sys.modules, 'starlette' in sys.modules)"
    env = {"PYTHONPATH": ":".join(filter(None, sys.path)) + ":."}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert output.endswith("False False\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sreve"], "Did you mean 'serve'?"),
        (["frobnicate"], "Commands: bench, chat, compile, generate, pull, serve, train-draft, tune-tree"),
        (["--traget", "x"], "--target"),
        (["serve", "--prot", "1"], "--port"),
        (["serve"], "--target"),
        (["serve", "--target", "x", "--port", "70000"], "65535"),
        (["serve", "--target", "x", "--tree-budget", "some"], "auto"),
        (["serve", "--target", "x", "--device", "cdua"], "'cuda'"),
        (["serve", "--target", "x", "--api-key", "a b"], "--api-key"),
        (["serve", "--target", "x", "--max-slots", "0"], "max_slots must be from 1 to 1024"),
        (["serve", "--target", "x", "--kv-memory", "-1"], "kv_memory"),
        (["chat"], "--url"),
        (["chat", "--target", "x", "--url", "y"], "--url"),
        (["generate", "--target", "x"], "PROMPT"),
    ],
)
def test_wrong_usage(capsys, args, words):
    status, out, err = run(capsys, *args)
    assert status == 2 and out == "" and words in err


@pytest.mark.parametrize(
    ("error", "status", "stderr"),
    [
        (ModelError("no such model"), 1, "error: no such model\n"),
        (ConfigError("bad setting"), 2, "error: bad setting\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures(capsys, monkeypatch, error, status, stderr):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("minispec.hub.pull", fail)
    got = run(capsys, "pull", "x")
    assert (got[0], got[1], got[2].lstrip("\n")) == (status, "", stderr)  # click ends the line that ^C stands on


def test_pull(capsys, monkeypatch):
    monkeypatch.setattr("minispec.hub.pull", lambda name, progress: f"/models/{name}/{progress}")
    assert run(capsys, "pull", "m", "--quiet") == (0, "/models/m/False\n", "")


def test_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = run(capsys, "serve", "--target", "no-such-model", "--port", str(port))
    assert status == 1 and err.startswith(f"error: port {port} on 127.0.0.1 is in use") and "--port" in err


def test_unknown_model_and_host(capsys):
    status, _, err = run(capsys, "serve", "--target", "no-such-model", "--port", "0")
    assert status == 1 and err.startswith("error: There is no model 'no-such-model'.")
    status, _, err = run(capsys, "serve", "--target", "x", "--host", "no.such.host.invalid")
    assert status == 2 and "--host" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threads", "100000"), "1<=x<=512"),
        (("--drain-timeout", "nan"), "nan"),
        (("--step-timeout", "nan"), "nan"),
        (("--cors-origin", "example.org"), "'example.org'"),
        (("--cors-origin", "https://example.org/"), "without a path"),
        (("--served-model-name", ""), "--served-model-name is empty"),
    ],
)
def test_options_that_could_not_work_are_refused_at_once(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("minispec.server.bind.bind", lambda *args: pytest.fail("it began to serve"))
    status, out, err = run(capsys, "serve", "--target", "x", *arguments)
    assert status == 2 and out == "" and message in err


@pytest.mark.parametrize("missing", ["shard", "tensor"])
def test_incomplete_weights_are_told_before_anything_is_served(capsys, monkeypatch, tmp_path, missing):
    monkeypatch.setattr("minispec.server.run.serve", lambda *args, **named: pytest.fail("it was served"))
    folder = tiny_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    shards = {f"model-0000{i + 1}-of-00003.safetensors": sorted(weights)[i::3] for i in range(3)}
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, folder / name)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    first, *rest = shards["model-00002-of-00003.safetensors"]
    broken = folder / "model-00002-of-00003.safetensors"
    if missing == "shard":
        broken.unlink()
    else:
        save_file({tensor: weights[tensor] for tensor in rest}, broken)
    status, out, err = run(capsys, "serve", "--target", str(folder), "--port", "0", "--device", "cpu")
    assert status == 1 and out == "" and err.startswith("error: ")
    assert (broken.name if missing == "shard" else first) in err


@pytest.mark.parametrize("prefix", [["serve"], []])
def test_serve_passes_its_options_on(capsys, monkeypatch, prefix):
    seen = SimpleNamespace()

    def serve(load, options, sock, **more):
        seen.options, seen.more, seen.config = options, more, load()
        return 7

    monkeypatch.setattr("minispec.load.preflight", lambda config: None)
    monkeypatch.setattr("minispec.load.load_engine", lambda config: config)
    monkeypatch.setattr("minispec.server.run.serve", serve)
    monkeypatch.setenv("MINISPEC_API_KEY", "from-env")
    args = "--target some/model --draft none --port 0 --max-slots 3 --tree-budget 12 --kv-memory 0.5 --dtype float32"
    args += " --cors-origin https://a.example --cors-origin https://b.example --open-metrics --drain-timeout 2.5"
    assert run(capsys, *prefix, *args.split())[0] == 7
    config, options = seen.config, seen.options
    assert (config.target, config.draft, config.max_slots, config.tree_budget) == ("some/model", "none", 3, 12)
    assert (config.kv_memory, config.dtype, config.max_context) == (0.5, "float32", None)
    assert options.model_name == "some/model" and options.api_keys == ("from-env",) and options.open_metrics
    assert options.cors_origins == ("https://a.example", "https://b.example")
    assert seen.more == {"drain_timeout": 2.5, "max_waiting": 256, "step_timeout": 120.0}
    assert run(capsys, *prefix, *args.split(), "--api-key", "a", "--api-key", "b", "--served-model-name", "m")[0] == 7
    assert seen.options.api_keys == ("a", "b") and seen.options.model_name == "m"


class FakeLLM:
    """Answers "Hello" in two events."""

    def __init__(self, **settings):
        EngineConfig(**settings)  # which refuses what it does not know

    def default_params(self, **params):
        return params

    def stream(self, prompt, params):
        CALLS.append((prompt, params))
        for text in ("Hel", "lo"):
            yield SimpleNamespace(text=text, request=SimpleNamespace(text="Hello", error=None))


CALLS: list = []


@pytest.fixture
def llm(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr("minispec.llm.LLM", FakeLLM)
    return CALLS


def test_generate(capsys, llm):
    assert run(capsys, "generate", "--target", "m", "Hi", "--temperature", "0", "--stop", "x")[:2] == (0, "Hello\n")
    assert llm == [([{"role": "user", "content": "Hi"}], {"temperature": 0.0, "stop": ("x",)})]
    assert run(capsys, "generate", "--target", "m", "Hi", "--raw", "--max-tokens", "5")[:2] == (0, "Hello\n")
    assert llm[1] == ("Hi", {"max_tokens": 5, "stop": ()})


def test_generate_json(capsys, llm, monkeypatch):
    from minispec.llm import RequestOutput

    output = RequestOutput("Hello", [1, 2], "stop", {"prompt_tokens": 1})
    monkeypatch.setattr("minispec.llm.RequestOutput.of", lambda request: output)
    status, out, _ = run(capsys, "generate", "--target", "m", "Hi", "--json")
    assert status == 0 and json.loads(out)["text"] == "Hello" and json.loads(out)["usage"] == {"prompt_tokens": 1}


def test_chat_options(capsys, monkeypatch):
    seen = {}
    monkeypatch.setattr("minispec.chat.run_chat", lambda backend, **params: seen.update(params, backend=backend) or 3)
    args = "chat --url http://localhost:1 --api-key k --temperature 0.5 --system be-brief"
    assert run(capsys, *args.split())[0] == 3
    assert seen["temperature"] == 0.5 and seen["system"] == "be-brief" and seen["top_k"] is None
    assert type(seen["backend"]).__name__ == "HttpBackend"


def test_generate_refuses_bad_sampling_before_it_loads_a_model(capsys):
    status, _, err = run(capsys, "generate", "--target", "no-such-model", "--temperature", "9", "Hi")
    assert status == 2 and "temperature must be a number from 0 to 2, not 9.0" in err
