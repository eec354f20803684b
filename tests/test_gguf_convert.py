"""Converting GGUF: tiny random models written as llama.cpp would write them, read back through transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers  # noqa: E402
from tokenizers.models import BPE  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from minispec import gguf_convert, hub  # noqa: E402
from minispec.errors import ModelError  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, 1234 times in 2024",
    "we're naïve; you'll see it's fine  (ok)\n\n",
]
TEXTS = [
    "Hello the quick  fox!\n\n\tit's 31415 and we're",
    "naïve café 日本語 кот ١٢٣ ½",
    "emoji 👩‍👩‍👧‍👦🎉 end ",
    "  lead <|im_start|>user\nhi<|im_end|>\n",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    *,
    quantisation: str = "Q8_0",
    fields: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    rope_factors: np.ndarray | None = None,
    tokenizer: Tokenizer | None = None,
    pre: str = "smollm",
    arch: str = "llama",
    **overrides: Any,
) -> LlamaForCausalLM:
    """Write a random model to ``path``; return it in fp32 with the weights that bf16 leaves of the quantised ones."""
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_level_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    config = LlamaConfig(**(sizes | overrides))
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(sizes["rope_theta"])

    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocab])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in (fields or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)

    names = {hf: ours for ours, hf in gguf_convert._GLOBAL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{hf}": f"blk.{layer}.{ours}" for ours, hf in gguf_convert._LAYER_NAMES.items()}
    kind = gguf.GGMLQuantizationType[quantisation]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            stem, suffix = name.rsplit(".", 1)
            kept = gguf.GGMLQuantizationType.F32 if parameter.ndim == 1 else kind
            values = parameter.numpy()
            exact = gguf.quants.dequantize(gguf.quants.quantize(values, kept), kept)
            if stem.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
                values = llama_cpp_permute(values, heads)
            if f"{names[stem]}.{suffix}" not in drop:
                writer.add_tensor(f"{names[stem]}.{suffix}", gguf.quants.quantize(values, kept), raw_dtype=kept)
            parameter.copy_(torch.tensor(exact).to(torch.bfloat16).float())
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def converted(source: Path) -> Path:
    folder = source.parent / "model"
    folder.mkdir()
    gguf_convert.convert(source, folder)
    return folder


def assert_same_model(folder: Path, reference: LlamaForCausalLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model) is LlamaForCausalLM
    state = model.state_dict()
    for name, expected in reference.state_dict().items():
        assert torch.equal(state[name], expected), name
    tokens = torch.randint(0, reference.config.vocab_size, (2, 40))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1", "F16", "F32", "BF16"])
def test_weights_and_logits_survive(tmp_path: Path, quantisation: str) -> None:
    reference = write_gguf(tmp_path / "tiny.gguf", quantisation=quantisation)
    folder = converted(tmp_path / "tiny.gguf")
    assert_same_model(folder, reference)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96},
    ],
)
def test_variants(tmp_path: Path, overrides: dict[str, Any]) -> None:
    reference = write_gguf(tmp_path / "tiny.gguf", **overrides)
    assert_same_model(converted(tmp_path / "tiny.gguf"), reference)


def test_head_dim_apart_from_hidden_size(tmp_path: Path) -> None:
    fields = {f"llama.{key}": 32 for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")}
    reference = write_gguf(tmp_path / "tiny.gguf", head_dim=32, fields=fields)
    assert_same_model(converted(tmp_path / "tiny.gguf"), reference)


def test_a_missing_bias_of_a_group_becomes_zero(tmp_path: Path) -> None:
    """Models such as InternLM have no bias on every attention linear; transformers has one flag for all four."""
    reference = write_gguf(tmp_path / "tiny.gguf", attention_bias=True, drop=("blk.1.attn_output.bias",))
    with torch.no_grad():
        reference.model.layers[1].self_attn.o_proj.bias.zero_()
    assert_same_model(converted(tmp_path / "tiny.gguf"), reference)


def test_blocks_of_rows_do_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_BLOCK_BYTES", 4 * 64 * 7)  # 7 rows of 64: cuts through every head
    reference = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    calls: list[tuple[int, int]] = []
    gguf_convert.convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: calls.append((done, total)))
    assert_same_model(tmp_path / "model", reference)
    assert calls[-1][0] == calls[-1][1] and calls == sorted(calls)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_keys(tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any]) -> None:
    write_gguf(tmp_path / "tiny.gguf", fields=fields)
    folder = converted(tmp_path / "tiny.gguf")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    AutoModelForCausalLM.from_pretrained(folder)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    """The factors are those transformers computes, and the scaling found in them gives the same logits."""
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"rope_theta": 10000.0, "max_position_embeddings": 32768}
    one_head = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1} | shape
    plain = LlamaForCausalLM(LlamaConfig(**one_head))
    scaled = LlamaForCausalLM(LlamaConfig(**one_head, rope_scaling=dict(scaling)))
    ratio = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    factors = gguf_convert.llama3_factors(10000.0, 64, 32.0)
    np.testing.assert_allclose(factors, ratio, rtol=1e-5)
    assert factors.min() == 1.0 and factors.max() == 32.0

    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1} | shape
    reference = write_gguf(tmp_path / "tiny.gguf", rope_factors=factors, rope_scaling=dict(scaling), **sizes)
    folder = converted(tmp_path / "tiny.gguf")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    assert_same_model(folder, reference)


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", rope_factors=np.linspace(1, 5, 8, dtype=np.float32))
    with pytest.raises(ModelError, match="rope_freqs"):
        converted(tmp_path / "tiny.gguf")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_byte_level_tokenizer_survives(tmp_path: Path) -> None:
    original = byte_level_tokenizer()
    write_gguf(tmp_path / "tiny.gguf", tokenizer=original)
    folder = converted(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == original.encode(text).ids == fast(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("2024").tokens == list("2024")
    assert tokenizer.decode([1, 2]) == ""  # control tokens are special
    assert (fast.bos_token, fast.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert fast.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 12345 ok", ["it", "'s", " 12345", " ok"]),
        ("smollm", "it's 123 ok", ["it", "'s", " ", "1", "2", "3", " ok"]),
        ("llama-bpe", "IT'S 12345 ok\n\n", ["IT", "'S", " ", "123", "45", " ok", "\n\n"]),
        ("qwen2", "it's 123 ok", ["it", "'s", " ", "1", "2", "3", " ok"]),
        ("default", "a+b 12345 ok", ["a", "+", "b", " ", "123", "45", " ok"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre=pre)
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "tiny.gguf") / "tokenizer.json"))
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="tekken")
    with pytest.raises(ModelError, match=r"'tekken' is not supported.*smollm"):
        converted(tmp_path / "tiny.gguf")


class Keys:
    """Metadata from a dict, for the parts that need no file."""

    path = Path("fake.gguf")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def need(self, key: str) -> Any:
        return self.values[key]


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    original = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words = random.Random(0).choices(["the", "them", "there", "other", "mother", "some", "something", "ring"], k=400)
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special + bytes_, show_progress=False)
    original.train_from_iterator([" ".join(words[i : i + 8]) for i in range(0, 400, 8)], trainer)
    tokens = sorted(original.get_vocab(), key=original.token_to_id)
    merges = [left + right for left, right in json.loads(original.to_str())["model"]["merges"]]
    scores = [-float(merges.index(token)) if token in merges else -1e6 for token in tokens]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}

    gguf_convert.write_tokenizer(Keys(values | ids), tmp_path, context_length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("the mother of something", "other things there", "thé 日本 👍 ring", "two  spaces "):
        encoded = tokenizer.encode(text)
        assert encoded.ids[0] == 1  # SentencePiece models start with BOS unless the file says otherwise
        assert encoded.ids[1:] == original.encode(text).ids
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.decode(tokenizer.encode("  the ring").ids) == "  the ring"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True and config["unk_token"] == "<unk>"

    gguf_convert.write_tokenizer(
        Keys(values | ids | {"add_bos_token": False, "add_space_prefix": False}), tmp_path, context_length=64
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert "".join(tokenizer.encode("the ring").tokens) == "the▁ring"
    assert tokenizer.decode(tokenizer.encode(" the ring").ids) == " the ring"


def test_user_defined_tokens_are_kept_in_the_text(tmp_path: Path) -> None:
    tokens = ["a", "b", "<tool>", "</s>"]
    keys = Keys({"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1, 1, 4, 3], "merges": []})
    gguf_convert.write_tokenizer(keys, tmp_path, context_length=8)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a<tool>b</s>").ids == [0, 2, 1, 3]
    assert tokenizer.decode([0, 2, 1, 3]) == "a<tool>b"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["x y"]}, "cannot be rebuilt"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": [], "eos_token_id": 9}, "eos_token_id is 9"),
    ],
)
def test_bad_tokenizers(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    keys = Keys({"tokens": ["a", "b"], "token_type": [1, 1]} | values)
    with pytest.raises(ModelError, match=message):
        gguf_convert.write_tokenizer(keys, tmp_path, context_length=8)


# --- files that cannot be used ---------------------------------------------------------------------------------------


def test_another_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", arch="gemma3")
    with pytest.raises(ModelError, match="'gemma3'"):
        converted(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ModelError, match=r"truncated|Cannot read"):
        converted(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>" * 10)
    with pytest.raises(ModelError, match="not a GGUF file"):
        converted(tmp_path / "page.gguf")
    with pytest.raises(ModelError, match="no file"):
        gguf_convert.convert(tmp_path / "absent.gguf", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"fields": {"split.count": 3}}, "llama-gguf-split"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "RoPE over 8 of 16"),
        ({"fields": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}}, "'longrope'"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "no tensor 'blk.1.ffn_up.weight'"),
        ({"drop": ("output_norm.weight",)}, "no tensor 'output_norm.weight'"),
    ],
)
def test_unsupported_models(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ModelError, match=message):
        converted(tmp_path / "tiny.gguf")


def test_tensors_without_a_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping what is not understood (a QK norm, say) would convert to a model that talks nonsense."""
    write_gguf(tmp_path / "tiny.gguf", rope_factors=np.ones(8, dtype=np.float32))
    monkeypatch.setattr(gguf_convert, "_IGNORED_TENSORS", set())
    with pytest.raises(ModelError, match="no place for: rope_freqs"):
        converted(tmp_path / "tiny.gguf")


def test_pull_of_a_local_gguf_file(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    reference = write_gguf(source)
    weights = tmp_path / "weights"
    with pytest.raises(ModelError, match=r"minispec pull .*tiny\.gguf"):
        hub.resolve(str(source), weights_dir=weights)
    folder = hub.pull(str(source), weights_dir=weights, progress=False)
    assert folder == weights / "tiny" == hub.resolve(str(source), weights_dir=weights)
    assert_same_model(folder, reference)
