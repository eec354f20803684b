"""The compiled step for tests: fixtures in conftest build it once for all of them, as a user's machine would."""

import pytest

from minispec.native import build

needs_machine = pytest.mark.skipif(
    build.obstacle() is not None or build.compiler() is None, reason="this machine cannot compile or run the step"
)
