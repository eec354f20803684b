"""config.json of every family, and what is refused."""

import json
from pathlib import Path

import pytest
import transformers

from minispec.errors import ConfigError, ModelError
from minispec.model import ModelConfig
from tiny_models import TINY, VARIANTS

LLAMA = {"architectures": ["LlamaForCausalLM"], **TINY}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_what_transformers_writes(tiny, variant: str) -> None:
    folder, _ = tiny(variant)
    config, theirs = ModelConfig.from_folder(folder), transformers.AutoConfig.from_pretrained(folder)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.type == theirs.rope_parameters["rope_type"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.max_position == 64


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_keys_mean_what_they_mean_to_transformers(architecture: str) -> None:
    data = {"architectures": [f"{architecture}ForCausalLM"], **TINY}
    del data["max_position_embeddings"]
    config = ModelConfig.from_json(data)
    theirs = getattr(transformers, f"{architecture}Config")(
        **{k: v for k, v in data.items() if k not in ("architectures",)}
    )
    assert config.max_position == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.head_dim == getattr(theirs, "head_dim", 16)
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.qkv_bias == (architecture == "Qwen2")
    assert config.qk_norm == (architecture == "Qwen3")
    assert not config.o_bias
    assert not config.mlp_bias


def test_model_type_stands_in_for_architectures() -> None:
    data = {"model_type": "llama", **TINY}
    assert ModelConfig.from_json(data) == ModelConfig.from_json(LLAMA)


@pytest.mark.parametrize(("given", "head_dim"), [({"head_dim": None}, 16), ({}, 16), ({"head_dim": 32}, 32)])
def test_head_dim(given: dict, head_dim: int) -> None:
    assert ModelConfig.from_json(LLAMA | given).head_dim == head_dim
    assert ModelConfig.from_json({"architectures": ["Qwen3ForCausalLM"], **TINY, "head_dim": None}).head_dim == 16


def test_key_value_heads_default_to_all_heads() -> None:
    assert ModelConfig.from_json(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4


def yarn(max_position: int, **more: object) -> ModelConfig:
    return ModelConfig.from_json(
        LLAMA | {"max_position_embeddings": max_position, "rope_scaling": {"type": "yarn", "factor": 4.0, **more}}
    )


def test_context_limit_is_multiplied_by_the_factor_once() -> None:
    assert yarn(131072, original_max_position_embeddings=32768).max_position == 131072
    # Qwen3's documentation adds the scaling and leaves max_position_embeddings as it was
    assert yarn(40960, original_max_position_embeddings=32768).max_position == 131072
    assert yarn(163840, original_max_position_embeddings=32768).max_position == 163840
    assert yarn(32768).max_position == 32768
    for scaling in ({"type": "linear", "factor": 4}, {"type": "dynamic", "factor": 4}):
        assert ModelConfig.from_json(LLAMA | {"rope_scaling": scaling}).max_position == 64


def test_context_beyond_the_limit_is_refused_with_both_numbers() -> None:
    plain = ModelConfig.from_json(LLAMA)
    plain.require_context(64)
    with pytest.raises(ConfigError, match=r"65.*64"):
        plain.require_context(65)
    with pytest.raises(ConfigError, match=r"256.*64.*dynamic"):
        ModelConfig.from_json(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4}}).require_context(256)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "LlamaForCausalLMEagle3"),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq.*unquantised"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "128"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "magic"}}, "magic"),
    ],
)
def test_refused(tmp_path: Path, change: dict, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_folder(tmp_path)


def test_layers_that_mix_windowed_and_full_attention_are_refused() -> None:
    data = {"architectures": ["Qwen2ForCausalLM"], **TINY, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(ModelError, match="1 of 2 layers"):
        ModelConfig.from_json(data)
    assert ModelConfig.from_json(data | {"max_window_layers": 2}).sliding_window is None
    assert ModelConfig.from_json(data | {"use_sliding_window": False}).sliding_window is None


@pytest.mark.parametrize("content", ["", "{", "[]", "5"])
def test_a_broken_file_names_itself_and_a_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json.*Fetch the model again"):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_file_names_itself_and_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json not found.*minispec pull"):
        ModelConfig.from_folder(tmp_path)
