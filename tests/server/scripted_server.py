"""A server process with a scripted engine: python scripted_server.py FOLDER SETTINGS-AS-JSON."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fake_worker import MODEL, Script, scripted_engine
from minispec.errors import ModelError
from minispec.server.app import ServerOptions
from minispec.server.bind import bind
from minispec.server.run import serve


def main() -> int:
    settings = json.loads(sys.argv[2])
    delay = settings.get("delay", 0.0)
    script = Script(
        reply=lambda prompt: None if "endless" in prompt else "x" * 60,
        delay=delay,
        fail_from=settings.get("fail_from", float("inf")),
    )

    def load():
        time.sleep(settings.get("load_seconds", 0))
        if "load_error" in settings:
            raise ModelError(settings["load_error"])
        return scripted_engine(script, Path(sys.argv[1]), max_context=100_000, pages=50_000)

    sock = bind("127.0.0.1", 0)
    options = ServerOptions(model_name=MODEL)
    return serve(load, options, sock, drain_timeout=settings.get("drain_timeout", 30.0))


if __name__ == "__main__":
    sys.exit(main())
