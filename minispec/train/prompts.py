"""What the target is asked to write: system prompts, and the first words of user turns that it completes itself.

A model asked to go on after its template's user header writes the kind of prompt it was tuned on. Left alone it keeps
to few subjects, so most turns are begun for it: a phrase, often with a subject drawn from a list, which it completes at
temperature 1. The phrases cover conversation, writing, code, maths and summaries; no data set is involved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """How a conversation begins.

    Attributes:
        kind: what it is about: ``chat``, ``code``, ``maths``, ``summary``, ``free`` or ``file``.
        system: the system prompt; None leaves it to the template.
        start: the first words of the user turn, which the target completes; the whole turn if ``complete``.
        max_tokens: most tokens the target adds to it.
        complete: nothing is added.
    """

    kind: str
    system: str | None
    start: str
    max_tokens: int
    complete: bool = False


SHARES = {"chat": 0.44, "code": 0.19, "maths": 0.17, "summary": 0.14, "free": 0.06}
"""How often each kind is drawn."""

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in a few sentences.",
    "You are a patient teacher who explains things step by step.",
    "You are an experienced software engineer.",
    "You are a maths tutor. Show your work.",
    "You are a journalist who writes in plain language.",
    "You are a creative writer with a vivid style.",
    "You are a careful editor.",
    "You are an expert assistant. Give complete and accurate answers.",
    "You are a friendly travel guide.",
    "Answer the user's question as well as you can.",
    "You summarise texts faithfully and briefly.",
    "You are a Python programming assistant. Reply with code and a short explanation.",
    "You are a historian.",
    "You are a scientist who loves clear examples.",
    "You are a career coach.",
)

_SUBJECTS = (
    "renewable energy", "the Roman Empire", "black holes", "healthy breakfasts", "learning the guitar",
    "photosynthesis", "the stock market", "remote work", "a trip to Japan", "climate change", "time management",
    "the French Revolution", "machine learning", "gardening in small spaces", "the human heart", "public transport",
    "online privacy", "writing a novel", "job interviews", "ocean currents", "the water cycle", "a small bakery",
    "electric cars", "meditation", "the solar system", "volcanoes", "inflation", "vaccines", "chess openings",
    "running a marathon", "a lonely lighthouse keeper", "a robot who learns to paint", "an old bookshop",
    "a dragon afraid of fire", "the invention of the printing press", "genetic engineering", "social media",
    "a birthday party", "learning Spanish", "quantum physics", "bees", "the Great Wall of China",
    "a mountain village", "saving money", "teamwork", "customer complaints", "school uniforms",
    "artificial intelligence in medicine", "plastic waste", "sleep", "the Industrial Revolution",
    "a detective in a small town", "cooking pasta", "wild wolves", "space travel", "a football match",
    "the immune system", "democracy", "computer networks", "databases", "supply and demand", "coffee",
    "a family reunion", "a new smartphone", "music festivals", "conflict at work", "dog training",
    "the theory of evolution", "urban planning", "a storm at sea", "leadership", "volunteering", "first aid",
    "ancient Egypt", "a healthy diet", "yoga", "children's books", "e-commerce", "national parks", "earthquakes",
    "Shakespeare", "microservices", "video games", "the moon landing", "recycling", "stress", "a wedding speech",
    "the Amazon rainforest", "a museum visit", "freelancing", "cyber security", "a lost letter", "friendship",
)  # fmt: skip

_CHAT = (
    "Write a short story about {s}", "Write an email to", "Write a blog post about {s}", "Write a poem about {s}",
    "Explain {s} to", "Explain how", "What are the main", "What is the difference between", "What would happen if",
    "How can I", "How do I", "Give me tips on {s}", "Give me five ideas for", "Imagine you are", "Pretend to be",
    "Describe a scene", "Describe {s}", "Draft a letter", "Draft a speech about {s}", "Suggest", "List three",
    "Compare", "Discuss the advantages and disadvantages of {s}", "Tell me about {s}", "Can you help me",
    "Can you explain", "Could you write", "Create a plan for", "Create a dialogue between", "Design", "Outline",
    "Rewrite the following", "Edit the following paragraph", "Translate", "Classify", "Extract", "Why do", "Why is",
    "Who was", "When did", "I want to", "I need advice on {s}", "I am writing an essay about {s}", "My friend",
    "Please write", "Please explain {s}", "As a", "Act as", "Analyze", "Evaluate", "Identify",
    "Provide an example of", "Write a product description for", "Write a review of", "Write a persuasive",
    "Write a formal", "Write a paragraph about {s}", "Write an article about {s}", "Compose", "Propose",
    "Develop a strategy for", "Give a brief overview of {s}", "What do you think about {s}",
    "In a few sentences, explain {s}", "Make a list of", "Which", "If you could", "Should", "Is it true that",
    "Answer the following question:", "Read the following text and answer", "Here is a short text.",
    "Continue the story:",
)  # fmt: skip

_CODE_TASKS = (
    "Write a Python function that", "Write a Python function to", "Write a function in Python that takes a list",
    "Write a function that takes a string and", "Write a Python program that", "Write a Python class",
    "Write a SQL query", "Write a JavaScript function that", "Write a C++ program that", "Write a Java method that",
    "Write a bash script", "Implement", "Fix the bug in this Python code:\n\ndef ",
    "Explain what this code does:\n\ndef ", "What is the output of this code?\n\n",
    "Complete the following Python function:\n\ndef ", "Complete this function.\n\ndef ",
    "Finish the function below.\n\n```python\ndef ", "Here is the start of a function:\n\ndef ",
    "Implement the function below.\n\ndef ", "Fill in the body of this function:\n\ndef ",
    "Complete the Python code:\n\nfrom typing import List\n\n\ndef ", "Solve this with Python:\n\ndef ",
)  # fmt: skip
_FUNCTIONS = (
    "is_", "count_", "find_", "get_", "sum_", "max_", "min_", "sort_", "remove_", "reverse_", "merge_", "filter_",
    "check_", "compute_", "convert_", "split_", "longest_", "shortest_", "first_", "last_", "unique_", "even_",
    "odd_", "prime_", "fibonacci", "factorial", "digits_", "string_", "list_", "word_", "vowel_", "palindrome",
    "anagram", "binary_", "decimal_", "matrix_", "rotate_", "flatten_", "replace_", "encode_", "decode_", "parse_",
    "calculate_", "add_", "multiply_", "intersect", "generate_", "next_", "common_", "has_", "make_", "solve",
    "search_", "insert_", "bracket_", "double_",
)  # fmt: skip
_ARGUMENTS = (
    "", "(n: int) -> int:\n    \"\"\"", "(numbers: List[int]) -> int:\n    \"\"\"", "(s: str) -> str:\n    \"\"\"",
    "(lst):\n    \"\"\"", "(text):\n    '''", "(a, b):\n    \"\"\"", "(x: int, y: int) -> bool:\n    \"\"\"\n    ",
    "(words: List[str]) -> List[str]:\n    \"\"\" ", "(arr, k):\n    \"\"\"\n    Given ",
)  # fmt: skip

_NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kate", "Liam", "Maria",
    "Noah", "Olivia", "Paul", "Quentin", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Xin", "Yara", "Zoe",
    "Mr. Lopez", "Mrs. Green", "A farmer", "A shop", "A school", "A train", "A baker", "A teacher", "A library",
    "Two friends", "A tank", "A car", "A store", "A group of students", "A company", "The garden",
)  # fmt: skip
_FACTS = (
    " has {n} apples", " bought {n} books", " sells {n} cakes a day", " earns ${n} an hour", " is {n} years old",
    " drives {n} miles", " baked {n} cookies", " saved ${n}", " read {n} pages", " has twice as many", " walks",
    " collects", " needs", " is planning", " wants to buy", " works", " spends", " gave", " picked {n}", " ran",
    " has {n} boxes with", " shares {n}", " pays", " plants", " made {n}", "'s",
)  # fmt: skip
_MATHS = (
    "Solve the equation", "What is {n} percent of", "Calculate", "Find the value of x", "The sum of two numbers",
    "A rectangle has", "If {n} workers", "What is the area of", "How many", "There are {n}",
    "In a class of {n} students", "The price of", "The ratio of", "The average of", "What is the probability",
    "Simplify", "Find the derivative", "A recipe needs", "Half of", "Each day",
    "Solve this word problem step by step:",
)  # fmt: skip

_SUMMARY = (
    "Summarize this article: ", "Summarize the following text:\n\n",
    "Summarise the article below in two sentences.\n\n", "Give a short summary of this news story.\n\n",
    "What are the main points of this text?\n\n", "Write a summary: ",
    "Summarize the following news report in a few sentences. ", "TL;DR of this article, please:\n\n", "Summarize. ",
    "Please summarize the passage.\n\n", "Summary wanted: ", "Make this text shorter:\n\n",
)  # fmt: skip
_ARTICLES = (
    "(News) -- ", "LONDON -- ", "NEW YORK -- ", "Police said on Monday that ", "A man who ", "A woman from ",
    "The government has ", "Scientists have discovered ", "The club's manager ", "The president ", "After years of ",
    "Thousands of people ", "A new study ", "The company announced ", "It was the ", "Residents of ", "A court in ",
    "The film ", "Officials say ", "Players from ", "Millions of ", "The family of ", "Fire crews ", "Voters in ",
    "The actress ", "A school in ", "Researchers at ", "The mayor ", "An airline ", "Doctors ", "Two teenagers ", "",
)  # fmt: skip


def opening(seed: int, index: int) -> Opening:
    """Conversation ``index`` of a run; a function of its arguments."""
    rng = random.Random(f"{seed}:{index}")
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    # mostly the template's own system prompt: that is what most users leave in place
    system = rng.choice(_SYSTEMS) if rng.random() < 0.3 else None
    start, max_tokens = _START[kind](rng)
    # a lone blank at the end would be a token of its own, where the word to come brings one
    return Opening(kind, system, start.rstrip(" "), max_tokens)


def _chat(rng: random.Random) -> tuple[str, int]:
    return rng.choice(_CHAT).format(s=rng.choice(_SUBJECTS)), 64


def _code(rng: random.Random) -> tuple[str, int]:
    start = rng.choice(_CODE_TASKS)
    if start.endswith("def "):
        start += rng.choice(_FUNCTIONS)
        # half a name or a whole signature: both lead elsewhere
        return start + (rng.choice(_ARGUMENTS) if not start.endswith("_") else ""), 110
    return start, 80


def _maths(rng: random.Random) -> tuple[str, int]:
    number = rng.choice((rng.randint(2, 30), rng.randint(2, 12) * 5, rng.randint(20, 400)))
    start = rng.choice(_MATHS) if rng.random() < 0.35 else rng.choice(_NAMES) + rng.choice(_FACTS)
    return start.format(n=number), 80


def _summary(rng: random.Random) -> tuple[str, int]:
    return rng.choice(_SUMMARY) + rng.choice(_ARTICLES).rstrip(), rng.choice((140, 200, 260))


def _free(rng: random.Random) -> tuple[str, int]:
    return "", 64


_START = {"chat": _chat, "code": _code, "maths": _maths, "summary": _summary, "free": _free}
