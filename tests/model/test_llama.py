"""The forward pass equals transformers' for every kind of model, however the text is cut into steps."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minispec import hub
from minispec.batch import Span
from minispec.model import Llama, ModelConfig
from minispec.runner import ModelRunner
from minispec.tree import DraftTree
from tiny_models import VARIANTS

LENGTH = 40
CLOSE = {"atol": 1e-4, "rtol": 0.0}


def tokens_of(seed: int, count: int = LENGTH, vocab: int = 128) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


def runner_for(folder: Path, page_size: int = 4, **more: object) -> ModelRunner:
    """A float32 runner whose unwritten KV is NaN: reading it would poison the logits."""
    runner = ModelRunner(Llama.load(folder, device="cpu", dtype=torch.float32, **more), pages=256, page_size=page_size)
    runner.kv.k.fill_(float("nan"))
    runner.kv.v.fill_(float("nan"))
    return runner


def scattered(runner: ModelRunner, slots: int, positions: int = 64) -> list[list[int]]:
    """Per slot, pages in random order, none shared."""
    count = runner.kv.pages_for(positions)
    ids = random.Random(0).sample(range(256), slots * count)
    return [ids[i * count : (i + 1) * count] for i in range(slots)]


def whole(tokens: list[int], pages: list[int], num_cached: int = 0) -> Span:
    """A chunk with every row sampled."""
    return Span(tokens, pages, num_cached, range(len(tokens)), None, range(len(tokens)))


def random_tree(seed: int, root: int, nodes: int, deep: bool) -> DraftTree:
    """A tree with bushy and long branches; siblings' tokens are distinct."""
    rng = random.Random(seed)
    parents = [-1]
    for i in range(1, nodes):
        parents.append(i - 1 if deep and rng.random() < 0.8 else rng.randrange(i))
    tokens = [root, *rng.sample(range(128), nodes - 1)]
    return DraftTree(tuple(tokens), tuple(parents), tuple(0.0 for _ in tokens))


def assert_tree_matches(logits: Tensor, tree: DraftTree, prefix: list[int], oracle) -> None:
    """Each node's logits are those of the plain text that leads to it."""
    leaves = set(range(len(tree))) - set(tree.parents)
    for leaf in leaves:
        path = tree.path(leaf)
        expected = oracle(prefix + [tree.tokens[i] for i in path])[len(prefix) :]
        torch.testing.assert_close(logits[list(path)], expected, **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(tiny, variant: str) -> None:
    folder, oracle = tiny(variant)
    runner = runner_for(folder)
    tokens = tokens_of(1)
    logits = runner.forward([whole(tokens, scattered(runner, 1)[0])])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle(tokens), **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("chunk", "page_size"), [(1, 4), (3, 16), (7, 1)])
def test_chunks(tiny, variant: str, chunk: int, page_size: int) -> None:
    folder, oracle = tiny(variant)
    runner = runner_for(folder, page_size)
    tokens, pages = tokens_of(2), scattered(runner, 1)[0]
    parts = [runner.forward([whole(tokens[i : i + chunk], pages, i)]) for i in range(0, LENGTH, chunk)]
    torch.testing.assert_close(torch.cat(parts), oracle(tokens), **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("page_size", "prefix"), [(1, 13), (4, 15), (4, 16), (16, 15), (16, 16), (16, 17), (16, 0)])
def test_trees_chunks_and_single_tokens_in_one_step(tiny, variant: str, page_size: int, prefix: int) -> None:
    folder, oracle = tiny(variant)
    runner = runner_for(folder, page_size)
    pages = scattered(runner, 4)
    texts = [tokens_of(10 + i) for i in range(4)]
    if prefix:
        runner.forward(
            [Span.chunk(t[:prefix], p, 0, sample_last=False) for t, p in zip(texts[:3], pages, strict=False)]
        )
    # with the deep tree, a sliding window of 7 ends among the tree's own nodes
    bushy, deep = random_tree(3, 5, 12, deep=False), random_tree(4, 6, 40, deep=True)
    logits = runner.forward(
        [
            Span.tree(bushy, pages[0], prefix),
            Span.chunk(texts[3][:9], pages[3], 0, sample_last=True),
            Span.tree(DraftTree.root(texts[1][prefix]), pages[1], prefix),
            Span.tree(deep, pages[2], prefix),
        ]
    )
    assert logits.shape == (12 + 1 + 1 + 40, 128)
    assert_tree_matches(logits[:12], bushy, texts[0][:prefix], oracle)
    torch.testing.assert_close(logits[12], oracle(texts[3][:9])[-1], **CLOSE)
    torch.testing.assert_close(logits[13], oracle(texts[1][: prefix + 1])[-1], **CLOSE)
    assert_tree_matches(logits[14:], deep, texts[2][:prefix], oracle)


@pytest.mark.parametrize("variant", ["default", "mistral"])
def test_a_tree_may_be_written_in_several_steps(tiny, variant: str) -> None:
    folder, oracle = tiny(variant)
    runner = runner_for(folder)
    pages, text, tree = scattered(runner, 1)[0], tokens_of(20)[:13], random_tree(5, 7, 20, deep=False)
    runner.forward([Span.chunk(text, pages, 0, sample_last=False)])
    parts = [
        runner.forward(
            [Span(tree.tokens[a:b], pages, 13, tree.depth[a:b], tree.ancestors[a:b], range(b - a), first_key=a)]
        )
        for a, b in [(0, 1), (1, 8), (8, 20)]
    ]
    assert_tree_matches(torch.cat(parts), tree, text, oracle)


def test_committed_nodes_continue_like_plain_text(tiny) -> None:
    folder, oracle = tiny("default")
    runner = runner_for(folder)
    pages, text = scattered(runner, 1)[0], tokens_of(21)[:13]
    tree = DraftTree((1, 2, 3, 4, 5, 6, 7, 8), (-1, 0, 0, 2, 1, 3, 0, 5), (0.0,) * 8)
    runner.forward([Span.chunk(text, pages, 0, sample_last=False)])
    runner.forward([Span.tree(tree, pages, 13)])
    path = tree.path(7)
    runner.kv.commit([(pages, 13, path)])
    committed = text + [tree.tokens[i] for i in path]
    logits = runner.forward([Span.chunk([9], pages, len(committed), sample_last=True)])
    torch.testing.assert_close(logits[0], oracle([*committed, 9])[-1], **CLOSE)


def test_nothing_to_sample(tiny) -> None:
    runner = runner_for(tiny("default")[0])
    assert runner.forward([Span.chunk([1, 2, 3], [0], 0, sample_last=False)]).shape == (0, 128)


def test_padded_ids_have_no_logits(tiny) -> None:
    for variant in ("default", "tied"):
        folder, oracle = tiny(variant)
        runner = runner_for(folder, vocab_size=100)
        assert runner.vocab_size == 100
        tokens = tokens_of(1, vocab=100)
        torch.testing.assert_close(runner.forward([whole(tokens, range(16))]), oracle(tokens)[:, :100], **CLOSE)


def test_bfloat16_is_close_to_float32_and_its_best_logits_are_not_rounded(tiny) -> None:
    folder, oracle = tiny("default")
    runner = ModelRunner(Llama.load(folder, device="cpu", dtype=torch.bfloat16), pages=16, page_size=4)
    tokens = tokens_of(1)
    logits = runner.forward([whole(tokens, range(16))])
    assert logits.dtype == torch.float32
    assert (logits - oracle(tokens)).abs().mean() < 0.05
    best = logits.max(-1).values
    assert (best != best.bfloat16().float()).float().mean() > 0.8


def test_random_weights_depend_on_the_seed_only() -> None:
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_position=64, qkv_bias=True, qk_norm=True,
    )  # fmt: skip

    def logits(seed: int) -> Tensor:
        model = Llama.random(config, device="cpu", dtype=torch.float32, seed=seed)
        return ModelRunner(model, pages=4, page_size=4).forward([whole([1, 2, 3], [0])])

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a dragon who",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "The three laws of motion say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the boiling point of water?\nA:",
    "To bake a simple loaf of bread, first",
    "import os\nimport sys\n\ndef main(",
    "The quick brown fox",
    "In the year 1969, two men",
    "Zażółć gęślą jaźń.",
    "| name | age |\n|---|---|\n| Ann |",
    "Roses are red, violets are",
    "<html>\n<head>\n<title>",
    "The mitochondria are",
    "SELECT name, price FROM products WHERE",
    "Water is made of hydrogen and",
    "A haiku about autumn:\n",
    "If x + 3 = 10, then x =",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_text_of_a_real_model_equals_transformers() -> None:
    import transformers

    folder = hub.resolve("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None  # all 48 tokens, whatever they are
    runner = ModelRunner(Llama.load(folder, device="cpu", dtype=torch.float32), pages=8, page_size=32)
    for prompt in PROMPTS:
        tokens = tokenizer(prompt).input_ids
        expected = reference.generate(torch.tensor([tokens]), max_new_tokens=48, do_sample=False)
        length, step = len(tokens), tokens
        for _ in range(48):
            logits = runner.forward([Span.chunk(step, range(8), len(tokens) - len(step), sample_last=True)])
            step = [int(logits.argmax())]
            tokens = tokens + step
        assert tokens[length:] == expected[0, length:].tolist(), prompt


@pytest.mark.slow
def test_resident_memory_stays_below_two_and_a_half_times_the_weights() -> None:
    folder = hub.resolve("smollm2-135m")
    code = (
        "import sys, torch\n"
        "from minispec.batch import Span\nfrom minispec.model import Llama\nfrom minispec.runner import ModelRunner\n"
        "model = Llama.load(sys.argv[1], device='cpu', dtype=torch.bfloat16)\n"
        "ModelRunner(model, pages=16, page_size=32).forward([Span.chunk([1] * 300, range(16), 0, sample_last=True)])\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    peak = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    assert int(peak) * 1024 < 2.5 * (folder / "model.safetensors").stat().st_size
