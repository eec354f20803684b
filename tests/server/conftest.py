import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the scripted target and the tokenizer fixtures

from fake_worker import Script, live_server
from minispec.config import EngineConfig
from minispec.load import load_engine
from tiny_folders import tiny_folder
from tokenizers_fixture import BYTE_VOCAB_SIZE


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One server for the tests of a module that leave it as they found it."""
    with live_server(Script(), tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture
def serve(tmp_path):
    """Starts servers that end with the test: serve(script, **settings of live_server)."""
    with contextlib.ExitStack() as stack:
        yield lambda script=None, **settings: stack.enter_context(live_server(script or Script(), tmp_path, **settings))


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory):
    """A random model in float32 that says something else after every text, and may end anywhere; 40 ids are padding."""
    return tiny_folder(tmp_path_factory.mktemp("tiny"), vocab=BYTE_VOCAB_SIZE + 40, max_position=512)


@pytest.fixture(scope="session")
def tiny(tiny_model_folder):
    """A server of a real model, drafting by n-gram, for tests that leave it as they found it."""
    config = EngineConfig(target=str(tiny_model_folder), draft="ngram", dtype="float32", device="cpu", tree_budget=64)
    with live_server(Script(), tiny_model_folder, make_engine=lambda: load_engine(config)) as server:
        yield server
