import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the scripted target and the tokenizer fixtures

from fake_worker import Script, live_server


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
