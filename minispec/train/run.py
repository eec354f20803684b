"""``minispec train-draft``: the target writes text, a head is trained on it, and what it is worth is measured.

The three parts share the time given. What time decides (how much text there is, how many steps are made) is written
down once decided, so that a run which goes on after an interruption follows the curve that it would have followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from minispec import hub
from minispec.bench.run import read_prompts
from minispec.drafters import shipped
from minispec.errors import ConfigError, ModelError
from minispec.load import model_name
from minispec.model.config import ModelConfig
from minispec.runner import resolve_device
from minispec.tokenizer import Tokenizer
from minispec.train import report as reporting
from minispec.train.data import Example, Labeller, choose_vocabulary
from minispec.train.files import write
from minispec.train.folder import Recipe, RunFolder
from minispec.train.generate import Generator
from minispec.train.head import TrainableHead, default_taps
from minispec.train.origin import Origin
from minispec.train.prompts import Opening, opening
from minispec.train.shards import ANSWER, GIVEN, Sample
from minispec.train.target import Numerics, Target, numerics
from minispec.train.trainer import Quality, Settings, Trainer, going_on

log = logging.getLogger(__name__)

VOCABULARY = 8192
_SHARD = 64  # conversations in a file
_SLOTS = {"cpu": 96, "cuda": 384}  # conversations written at once
_ROWS = {"cpu": 512, "cuda": 8192}  # tokens of a batch
_GENERATE, _TRAIN = 0.55, 0.88  # shares of the time after which text and training are done
_EPOCHS = 4
_MOST_EPOCHS = 12  # however much time there is
_HELD_OUT, _CHECKED = 16, 32  # every 16th conversation is held out; at most 32 of them are looked at on the way
_CHECKS = 10  # times that they are, at most
_LOOKING = 0.06  # share of the time for training that goes there
_TRIAL = 3  # steps that are timed
_REPORTED = 16  # held-out conversations that the report continues, at most
_REPORTED_MINUTE = 1.2  # and for each minute of the run: one takes some five seconds of two cores
_CHECKPOINT_SECONDS = 60.0
_LEAST = 10_000  # tokens of text below which a warning is due


@dataclass(frozen=True)
class TrainOptions:
    """What ``minispec train-draft`` was asked for.

    Attributes:
        target: the model, as in ``--target``.
        out: folder for the head, the report and the training state.
        minutes: time for all of it; without it and ``tokens``, 60.
        tokens: text to train on instead, in tokens that the target writes; it is gone over ``_EPOCHS`` times.
        prompts: file of prompts to answer, mixed with those that the target writes.
        resume: go on with the run in ``out``.
        seed: of everything drawn.
        device: ``auto``, ``cuda`` or ``cpu``.
        vocabulary: tokens that the head has logits for.
        start: a head to begin with, a folder or a name; None begins with nothing.
    """

    target: str
    out: Path
    minutes: float | None = None
    tokens: int | None = None
    prompts: Path | None = None
    resume: bool = False
    seed: int = 0
    device: str = "auto"
    vocabulary: int = VOCABULARY
    start: str | None = None


class _Interrupted(Exception):
    """Ctrl-C came; what there is has been written."""


def run_train_draft(options: TrainOptions) -> int:
    """Train; returns the exit status, 130 after Ctrl-C.

    Raises:
        ConfigError, ModelError: a setting, a file or the model cannot be used.
    """
    if options.minutes is not None and options.tokens is not None:
        raise ConfigError("--minutes and --tokens both say how long to train; give one of them")
    try:
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError:
        raise ConfigError("train-draft draws its curves with matplotlib: pip install 'minispec[plot]'") from None
    folder = hub.resolve(options.target)
    prompts = [prompt.text for prompt in read_prompts(options.prompts)] if options.prompts else []
    tokenizer = Tokenizer.from_folder(folder)
    if not tokenizer.chat_template.sources:
        raise ModelError(
            f"{folder} has no chat template, and a head is trained on conversations; add one to the folder"
        )
    device = resolve_device(options.device)
    how = numerics(folder, device)
    shape = ModelConfig.from_folder(folder)
    origin = Origin.load(options.start, shape, default_taps(shape.num_layers)) if options.start else None
    recipe = Recipe(
        target=shipped.fingerprint(folder),
        seed=options.seed,
        minutes=60.0 if options.minutes is None and options.tokens is None else options.minutes,
        tokens=options.tokens,
        vocabulary=options.vocabulary,
        prompts=hashlib.sha256(options.prompts.read_bytes()).hexdigest() if options.prompts else None,
        dtype=str(how.dtype).removeprefix("torch."),
        compiled=how.compiled,
        start=None if origin is None else origin.sha256,
    )
    if origin is not None and (origin.target, origin.seed) == (recipe.target, recipe.seed) and not options.resume:
        log.warning(
            "%s was trained on the text that the target writes with --seed %d; another --seed gives it text that it "
            "does not know",
            options.start,
            recipe.seed,
        )
    run = RunFolder.open(options.out, recipe, resume=options.resume)
    console = Console(stderr=True)
    console.print(f"Loading {options.target} in {recipe.dtype} on {device.type}")
    # sums come in another order with another number of threads
    if "threads" not in run.notes:
        run.note(threads=torch.get_num_threads())
    torch.set_num_threads(run.notes["threads"])
    target = Target.load(folder, device, how, tokenizer.vocab_size)
    with _interruptible() as stopped:
        job = _Job(run, target, how, tokenizer, model_name(options.target), prompts, origin, console, stopped)
        try:
            job.generate()
            job.train()
            job.report()
        except _Interrupted as interrupted:
            console.print(f"Stopped: {interrupted} Go on with --resume and the same options.")
            return 130
    return 0


class _Job:
    """One run, part by part."""

    def __init__(
        self,
        run: RunFolder,
        target: Target,
        how: Numerics,
        tokenizer: Tokenizer,
        name: str,
        prompts: Sequence[str],
        origin: Origin | None,
        console: Console,
        stopped: Callable[[], bool],
    ) -> None:
        self._run = run
        self._target = target
        self._model = target.model
        self._how = how
        self._tokenizer = tokenizer
        self._name = name
        self._prompts = prompts
        self._origin = origin
        self._console = console
        self._stopped = stopped
        self._taps = default_taps(self._model.config.num_layers)
        self._before = float(run.notes["seconds"])
        self._begun = time.monotonic()
        self._checks: list[tuple[int, Quality]] = []

    @property
    def _seconds(self) -> float:
        """Time used so far, in earlier sessions too."""
        return self._before + time.monotonic() - self._begun

    @property
    def _limit(self) -> float | None:
        minutes = self._run.recipe.minutes
        return None if minutes is None else 60 * minutes

    # --- text --------------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """Let the target write until there is enough; again what was deleted since."""
        run, recipe = self._run, self._run.recipe
        whole = run.notes.get("shards", len(run.shards)) if run.notes.get("generated") else None
        if whole is not None and next(run.missing) >= whole:
            return
        slots = _SLOTS[self._model.device.type]
        generator = Generator(self._target, self._tokenizer, (*self._taps, self._model.config.num_layers),
                              seed=recipe.seed, slots=slots)  # fmt: skip
        begin, end = itertools.tee(itertools.takewhile(lambda n: whole is None or n < whole, run.missing))
        kept: dict[int, list[Sample]] = {}
        before, begun = run.tokens, time.monotonic()
        columns = (TextColumn("writing text"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"),
                   TextColumn("{task.fields[speed]:.0f}/s"), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=self._console, transient=True) as progress:
            total = recipe.tokens or _GENERATE * (self._limit or 0.0)
            task = progress.add_task("", total=total, tokens=before, speed=0.0)
            openings = ((index, self._opening(index)) for number in begin for index in _numbers(number))
            enough = self._written_enough if whole is None else lambda: False
            number = next(end, None)
            for index, samples in generator.stream(openings, self._check_stopped, enough):
                kept[index] = samples
                speed = generator.written / (time.monotonic() - begun)
                done = before + sum(_written(sample) for some in kept.values() for sample in some)
                progress.update(task, completed=done if recipe.tokens else self._seconds, tokens=done, speed=speed)
                while number is not None and all(i in kept for i in _numbers(number)):
                    run.add(number, [sample for i in _numbers(number) for sample in kept.pop(i)])
                    before, number = run.tokens, next(end, None)
                    run.note(seconds=self._seconds)
                if recipe.tokens is not None and before >= recipe.tokens and number == len(run.shards):
                    break
        rest = [sample for some in kept.values() for sample in some]
        if recipe.tokens is None and number is not None and rest:
            run.add(number, rest)
        if run.tokens == 0:
            raise ConfigError("--minutes is too short for the target to write a single conversation here; give more")
        run.note(
            seconds=self._seconds,
            generated=True,
            shards=len(run.shards),
            conversations=len(conversations(run.samples())),
            tokens=run.tokens,
        )
        if run.tokens < _LEAST:
            log.warning("%d tokens are hardly any text to learn from; the figures will mean little", run.tokens)
        self._console.print(f"{self._name} wrote {run.tokens:,} tokens in {run.notes['conversations']:,} conversations")

    def _written_enough(self) -> bool:
        return self._limit is not None and self._seconds > _GENERATE * self._limit

    def _opening(self, index: int) -> Opening:
        # a prompt of the file every third time, until each was used
        if index % 3 == 0 and index // 3 < len(self._prompts):
            return Opening("file", None, self._prompts[index // 3], 0, complete=True)
        return opening(self._run.recipe.seed, index)

    def _check_stopped(self) -> None:
        if self._stopped():
            self._run.note(seconds=self._seconds)
            raise _Interrupted(f"{self._run.tokens:,} tokens of text are kept; there is no head yet.")

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train on the text, from the last checkpoint on if there is one."""
        run, recipe = self._run, self._run.recipe
        groups = conversations(run.samples())
        learnt = [s for i, group in enumerate(groups) for s in group if i % _HELD_OUT or len(groups) == 1]
        # of those held out, the answers at temperature 0
        self._held_out = [group[0] for group in groups[::_HELD_OUT]]
        ids = choose_vocabulary(learnt, self._model, recipe.vocabulary)
        if self._origin is None:
            head = TrainableHead.start(self._model, ids, self._taps, learnt, recipe.seed)
        else:
            head = TrainableHead.go_on(self._origin, self._model, ids, learnt)
        labeller = Labeller(self._model, ids, head.scale)
        examples = [labeller(sample) for sample in learnt]
        checked = [labeller(sample) for sample in self._held_out[:_CHECKED]]
        self._settings = self._decide(head, examples, checked)
        self._trainer = trainer = Trainer(head, examples, self._settings)
        if (state := run.last_checkpoint()) is not None:
            trainer.restore(state)
            self._checks = [(step, Quality(tuple(a), c, loss)) for step, a, c, loss in state["checks"]]
        columns = (TextColumn("training"), BarColumn(), TextColumn("step {task.completed}/{task.total}"),
                   TextColumn("{task.fields[tokens]:,} tokens"), TextColumn("loss {task.fields[loss]:.3f}"),
                   TextColumn("acceptance {task.fields[chain]}"), TimeRemainingColumn())  # fmt: skip
        saved = time.monotonic()
        tokens = 0
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=self._settings.steps, tokens=0, loss=0.0, chain="-")
            every = max(self._settings.steps // run.notes["checks"], 1)
            while True:
                if trainer.step % every == 0 or trainer.done:
                    self._look(checked)
                    progress.update(task, chain=f"{self._checks[-1][1].chain:.2f}")
                if trainer.done:
                    break
                if self._stopped():
                    self._save()
                    raise _Interrupted(f"the head of step {trainer.step} is in {run.out} and can be used.")
                tokens += trainer.advance()
                progress.update(task, completed=trainer.step, tokens=tokens, loss=trainer.curve[-1][1])
                if time.monotonic() - saved > _CHECKPOINT_SECONDS:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _decide(self, head: TrainableHead, examples: Sequence[Example], checked: Sequence[Example]) -> Settings:
        """How many steps, and how often to look; once for all."""
        run = self._run
        device = self._model.device.type
        base: dict[str, Any] = {
            "seed": run.recipe.seed,
            "rows": _ROWS[device],
            "bfloat16": self._how.autocast,
            # a GPU has the time for the whole softmax
            "negatives": 1024 if device == "cpu" else None,
        }
        if self._origin is not None:
            base |= going_on(run.notes.get("steps", 0))
        if "steps" not in run.notes:
            trial = Trainer(head, examples, Settings(steps=1, **base))
            begun = time.monotonic()
            self._checks = [(0, trial.evaluate(checked))]
            look = time.monotonic() - begun
            epoch, seconds = price(head, examples, base)
            steps, checks = _EPOCHS * epoch, _CHECKS
            if self._limit is not None:
                left = max(_TRAIN * self._limit - self._seconds, 0.0)
                checks = int(min(max(_LOOKING * left / look, 2), _CHECKS))
                steps = int((left - checks * look) / seconds)
            run.note(steps=max(min(steps, _MOST_EPOCHS * epoch), 8), epoch=epoch, checks=checks)
        if self._origin is not None:
            base |= going_on(run.notes["steps"])
        return Settings(steps=run.notes["steps"], **base)

    def _look(self, examples: Sequence[Example]) -> None:
        step = self._trainer.step
        if not self._checks or self._checks[-1][0] < step:
            self._checks.append((step, self._trainer.evaluate(examples)))

    def _save(self) -> None:
        """The head, for whoever wants to use it, and the state of training."""
        run = self._run
        self._trainer.head.save(
            run.out,
            self._model.config,
            {
                shipped.KEY: {"name": self._name, "fingerprint": run.recipe.target},
                "minispec_training": {
                    "seed": run.recipe.seed,
                    "tokens": run.notes["tokens"],
                    "step": self._trainer.step,
                    "steps": self._settings.steps,
                    "from": run.recipe.start,
                },
            },
        )
        checks = [(step, list(q.accuracy), q.chain, q.loss) for step, q in self._checks]
        run.checkpoint({**self._trainer.state(), "checks": checks})
        run.note(seconds=self._seconds)

    # --- report ------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Measure the head on held-out text, and write and print what came of it."""
        run, trainer = self._run, self._trainer
        head = trainer.head
        labeller = Labeller(self._model, head.ids, head.scale)
        quality = trainer.evaluate([labeller(sample) for sample in self._held_out])
        minutes = run.recipe.minutes
        count = _REPORTED if minutes is None else min(_REPORTED, max(4, int(minutes * _REPORTED_MINUTE)))
        prompts = [_prompt(sample) for sample in self._held_out[:count]]
        self._console.print(f"Measuring the head on {len(prompts)} held-out conversations")
        lengths = reporting.measure(run.out, self._target, prompts, self._tokenizer.eos_ids)
        data: dict[str, Any] = {
            "target": self._name,
            "seed": run.recipe.seed,
            "from": run.recipe.start,
            "tokens": run.notes["tokens"],
            "conversations": run.notes["conversations"],
            "steps": trainer.step,
            "epochs": round(trainer.step / run.notes["epoch"], 2),
            "parameters": sum(p.numel() for p in head.parameters.values()),
            "vocabulary": len(head.ids),
            "taps": list(self._taps),
            "heldout": {"conversations": len(self._held_out), "measured": len(prompts)},
            "quality": asdict(quality),
            "acceptance_length": lengths,
            "seconds": round(self._seconds, 1),
            "curves": str(run.out / "curves.png"),
            "sha256": hashlib.sha256((run.out / "model.safetensors").read_bytes()).hexdigest(),
        }
        text = json.dumps(data)
        write(run.out / "report.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))
        reporting.draw(run.out / "curves.png", trainer.curve, self._checks)
        Console().print(reporting.table(data))
        run.note(seconds=self._seconds)
        print(text)


def price(head: TrainableHead, examples: Sequence[Example], settings: Mapping[str, Any]) -> tuple[int, float]:
    """(steps of an epoch, seconds that one takes on average over a run), found by a few that are taken back."""
    before = {name: parameter.detach().clone() for name, parameter in head.parameters.items()}
    onset = Settings(1, **settings).onset
    seconds, epoch = [], 0
    for onsets in (onset[:1], (0.0,) * len(onset)):
        trial = Trainer(head, examples, Settings(steps=_TRIAL + 1, **{**settings, "onset": onsets}))
        trial.advance()
        begun, rows = time.monotonic(), 0
        while not trial.done:
            rows += trial.advance()
        epoch = trial.epoch_batches
        seconds.append((time.monotonic() - begun) / rows * sum(len(e.tokens) for e in examples) / epoch)
    with torch.no_grad():
        for name, parameter in head.parameters.items():
            parameter.copy_(before[name])
    # steps of training-time test cost about the same, each from its onset on
    first, full = seconds
    later = len(onset) - 1
    return epoch, first + (full - first) * sum(1 - share for share in onset[1:]) / later


def _numbers(shard: int) -> range:
    """Of the conversations in it."""
    return range(shard * _SHARD, (shard + 1) * _SHARD)


def conversations(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples grouped by the conversation they are of: answers to the same prompt follow one another."""
    return [list(group) for _, group in itertools.groupby(samples, key=_prompt)]


def _written(sample: Sample) -> int:
    return int((sample.classes != GIVEN).sum())


def _prompt(sample: Sample) -> list[int]:
    """What comes before the answer."""
    answer = int((sample.classes == ANSWER).nonzero()[0])
    tokens: list[int] = sample.tokens[:answer].tolist()
    return tokens


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the step at hand is finished first. Pressed twice, it interrupts as usual."""
    pressed = threading.Event()

    def note(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
