"""Choice of device and dtype, and the runner's cache."""

import pytest
import torch

from minispec import runner as runner_module
from minispec.batch import Span
from minispec.errors import ConfigError
from minispec.model import Llama, ModelConfig
from minispec.runner import ModelRunner, kv_bytes_per_position, resolve_device, resolve_dtype

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position=64,
)  # fmt: skip


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="--device cpu"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="tpu"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == resolve_device("cuda").type == "cuda"
    assert resolve_device("cpu") == CPU


def test_dtype(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False})
    with caplog.at_level("INFO", runner_module.__name__):
        assert resolve_dtype("auto", CPU) == torch.float32
    assert "float32" in caplog.text
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", CPU)


def test_cache_has_the_models_shape_and_size() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        runner = ModelRunner(Llama.random(CONFIG, device="cpu", dtype=dtype), pages=5, page_size=4)
        assert runner.kv.k.shape == (3, 2, 20, 8)
        assert runner.kv.k.dtype == dtype
        assert runner.kv.k.nbytes + runner.kv.v.nbytes == 20 * kv_bytes_per_position(CONFIG, dtype)
        assert (runner.vocab_size, runner.device) == (64, CPU)


def test_samples_come_in_the_order_of_the_spans() -> None:
    runner = ModelRunner(Llama.random(CONFIG, device="cpu", dtype=torch.float32), pages=8, page_size=4)
    spans = [
        Span.chunk([1, 2, 3], [0], 0, sample_last=True),
        Span.chunk([4, 5], [1], 0, sample_last=False),
        Span([6, 7, 8], [2], 0, range(3), None, (0, 2)),
    ]
    together = runner.forward(spans)
    alone = torch.cat([runner.forward([span]) for span in spans])
    assert together.shape == (3, 64)
    torch.testing.assert_close(together, alone)
    assert not together.requires_grad
