"""Files that appear whole or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from minispec.errors import ConfigError
from minispec.train.files import write

WAYS = {
    "text": lambda path: path.write_text("all of it"),
    "torch": lambda path: torch.save({"a": torch.ones(2)}, path),
    "safetensors": lambda path: save_file({"a": torch.ones(2)}, path),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_there_and_readable(tmp_path, way):
    write(tmp_path / "file", WAYS[way])
    [file] = tmp_path.iterdir()
    assert file.name == "file" and file.stat().st_mode & 0o777 == 0o644 and file.stat().st_size > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_is_gone_is_said(tmp_path, way):
    with pytest.raises(ConfigError, match=r"gone/file cannot be written: .*go on with --resume"):
        write(tmp_path / "gone" / "file", WAYS[way])


def test_nothing_is_left_of_half_a_file(tmp_path):
    (tmp_path / "file").write_text("before")

    def fail(path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        write(tmp_path / "file", fail)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]
