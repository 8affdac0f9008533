"""Whether the demo model's answers show what it read: its weights are random.

Greedy answers of 64 tokens to 50 prompts, and answers to prompts of which one token was changed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.report import Row, finish, row
from pullfill.demo.recipe import DEMO, SPECIAL_TOKENS
from pullfill.demo.tokenizer import build_tokenizer, readable
from pullfill.demo.weights import answer_only, random_weights
from tests.support.llama import Cache, Llama

PROMPTS, SHORT, LONG, ANSWER = 50, 48, 1000, 64
LONGEST_LOOP = 16
_QUESTIONS = (
    "What is a tokenizer?",
    "Tell me about the sea.",
    "Write a poem about rain.",
    "How do clouds form?",
    "Explain what a prefill worker does.",
)
_FILLER = " A prompt long enough to be worth sending away." * 40


def demo_model() -> Llama:
    """Return the model behind `--model demo`."""
    weights = random_weights(DEMO)
    answer_only(weights, readable(build_tokenizer(DEMO.vocab)))
    return Llama(DEMO, weights)


def prompts(count: int, length: int) -> Tensor:
    """Return prompts [count, length]: chats that differ in a number and a question."""
    tokenizer = build_tokenizer(DEMO.vocab)
    texts = (f"<|user|>{i} {_QUESTIONS[i % len(_QUESTIONS)]}{_FILLER}" for i in range(count))
    return torch.tensor([tokenizer.encode(text).ids[:length] for text in texts])


def answers(model: Llama, ids: Tensor, length: int = ANSWER) -> Tensor:
    """Return the greedy answers [batch, length] to prompts [batch, tokens]."""
    cache: Cache = {}
    said = [model.logits(ids, cache)[:, -1:].argmax(dim=-1)]
    while len(said) < length:
        said.append(model.logits(said[-1], cache).argmax(dim=-1))
    return torch.cat(said, dim=1)


def loops(answer: Tensor) -> bool:
    """Whether the second half of an answer repeats at most LONGEST_LOOP tokens."""
    half = answer[len(answer) // 2 :]
    return any(torch.equal(half[n:], half[:-n]) for n in range(1, LONGEST_LOOP + 1))


def changed(prompt: Tensor, every: int) -> Tensor:
    """Return a row for every `every`-th token of the prompt, with that token changed."""
    positions = torch.arange(0, len(prompt), every)
    rows, steps = prompt.repeat(len(positions), 1), torch.arange(len(positions))
    first, text = len(SPECIAL_TOKENS), 300
    rows[steps, positions] = first + (rows[steps, positions] - first + 37) % text
    return rows


def moved(model: Llama, prompt: Tensor, every: int) -> Iterator[float]:
    """Yield, for every `every`-th token, how far its change moves the likely next tokens.

    That is the largest change of the log probability of a token that had more than 1 %."""
    before = model.logits(prompt[None])[0, -1].log_softmax(dim=-1)
    likely = before > torch.tensor(0.01).log()
    for one in changed(prompt, every):
        after = model.logits(one[None])[0, -1].log_softmax(dim=-1)
        yield (after - before)[likely].abs().max().item()


def measure(count: int, every: int) -> list[Row]:
    """Return the rows. count: of prompts. every: change each so many-th token of a long prompt."""
    model, short = demo_model(), prompts(count, SHORT)
    said = answers(model, short)
    distinct = [len(set(answer.tolist())) for answer in said]
    rows = [
        row("distinct tokens of an answer, least", min(distinct), "of 64", at_least=16),
        row("distinct tokens of an answer, median", statistics.median(distinct), "of 64"),
        row("answers that end in a loop", sum(map(loops, said)), f"of {count}", at_most=0),
        row("distinct answers", len(said.unique(dim=0)), f"of {count}", at_least=count),
    ]
    near = [change for prompt in short[:5] for change in moved(model, prompt, 1)]
    far = list(moved(model, prompts(1, LONG)[0], every))
    for where, changes in ((f"{SHORT} tokens", near), (f"{LONG} tokens", far)):
        name = f"log probability moved by one changed token of {where}"
        rows.append(row(f"{name}, least", min(changes), "nats", at_least=0.01))
        rows.append(row(f"{name}, median", statistics.median(changes), "nats"))
    again = answers(model, changed(short[0], 1))
    others = int((again != said[0]).any(dim=1).sum())
    rows.append(row("answers changed by one changed token", others, f"of {SHORT}", at_least=SHORT))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-save", action="store_true", help="print only")
    save = not parser.parse_args().no_save
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = measure(PROMPTS, every=100)
    return finish("demo", rows, quiet=True, save=save, title="The demo model reads its prompt")


if __name__ == "__main__":
    sys.exit(main())
