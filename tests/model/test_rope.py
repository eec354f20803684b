"""Frequencies and attention scaling equal transformers' and the published numbers."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minispec.errors import ModelError
from minispec.model.rope import Rope, RopeConfig, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SETTINGS = [
    {},
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.5}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": YARN | {"attention_factor": 1.0}},
    {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_scaling": YARN | {"mscale": 0.7}},
    {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}},
    {"rope_scaling": YARN | {"truncate": False}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_equals_transformers(settings: dict, head_dim: int) -> None:
    data = {"max_position_embeddings": 131072, "head_dim": head_dim, **settings}
    ours = Rope(RopeConfig.from_json(data, 131072), head_dim)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(data))
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0.0)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-9)
    positions = torch.tensor([0, 1, 17, 4095, 100_000])
    cos, sin = ours.cos_sin(positions)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    assert cos.dtype == torch.float32
    assert cos.shape == (5, head_dim // 2)
    torch.testing.assert_close(cos, expected_cos[0, :, : head_dim // 2], rtol=0.0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin[0, :, : head_dim // 2], rtol=0.0, atol=1e-6)


def test_llama3_bends_the_middle_frequencies_only() -> None:
    data = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    scaled, _ = inverse_frequencies(RopeConfig.from_json(data, 131072), 128)
    plain, _ = inverse_frequencies(RopeConfig(theta=5e5), 128)
    ratio = scaled / plain
    assert ratio[0] == 1.0
    assert ratio[63] == 0.125
    between = [i for i in range(64) if 0.125001 < ratio[i] < 0.999999]
    assert between == list(range(29, 35))
    assert ratio[31] == pytest.approx(0.4935, abs=5e-5)
    assert ratio[32] == pytest.approx(0.3711, abs=5e-5)


def test_dynamic_is_plain_within_the_original_window() -> None:
    dynamic = RopeConfig.from_json({"rope_scaling": {"type": "dynamic", "factor": 4}}, 64)
    frequencies, scaling = inverse_frequencies(dynamic, 16)
    assert torch.equal(frequencies, inverse_frequencies(RopeConfig(), 16)[0])
    assert scaling == 1.0
    # a served length below the original makes the NTK base negative where it is computed from it
    cos, sin = Rope(dynamic, 16).cos_sin(torch.arange(32))
    assert cos.isfinite().all()
    assert sin.isfinite().all()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 1.138629),
        ({"attention_factor": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(more: dict, expected: float) -> None:
    rope = Rope(RopeConfig.from_json({"rope_scaling": YARN | more}, 131072), 64)
    assert rope.attention_scaling == pytest.approx(expected, abs=1e-6)
    cos, _ = rope.cos_sin(torch.tensor([0]))
    assert cos[0, 0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 2}, "'longrope'"),
        ({"rope_type": "su"}, "'su'"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear", "factor": math.nan}, "factor"),
        ({"type": "linear", "factor": True}, "factor"),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ([1], "rope_scaling"),
    ],
)
def test_refused(scaling: object, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        RopeConfig.from_json({"rope_scaling": scaling}, 4096)
