"""Every error minispec raises on purpose.

All messages name the limit, the value given and the remedy, so that a caller can show them as they are.

MinispecError
├── ConfigError          a wrong setting (command line or EngineConfig); exit status 2
├── ModelError           a model that cannot be found, read or paired; exit status 1
├── EngineFailed         nothing can be computed any more (containment.py); exit status 1
└── RequestError         one bad request; the HTTP API answers 4xx, the engine goes on
"""


class MinispecError(Exception):
    """Base class: an expected failure with a message fit for the user, never shown with a traceback."""

    exit_status = 1


class ConfigError(MinispecError):
    """A setting is out of range or contradicts another."""

    exit_status = 2


class ModelError(MinispecError):
    """A model folder, file or name cannot be used: missing, broken, unsupported, or not a pair with its draft."""


class RequestError(MinispecError):
    """A request that can never be served as it stands.

    Attributes:
        param: name of the offending request field, if one is to blame.
        code: machine-readable code in the style of the OpenAI API, e.g. ``context_length_exceeded``.
        status: HTTP status the server answers with.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
