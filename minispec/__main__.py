"""``python -m minispec`` is the ``minispec`` program."""

from minispec.cli import main

main()
