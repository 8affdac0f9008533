"""Teaches the demo model to write something that reads like English, in under a minute of one core.

Seeded, on one thread: deterministic for one machine and one Python. Two machines get similar
models, not equal bits: ship the directory when workers on several hosts must serve the same one.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pullfill.engine.demo_corpus import Entry, read_corpus
from pullfill.engine.demo_llama import EMBED, HEAD, NORM, Llama, layer_name, random_weights
from pullfill.engine.demo_recipe import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, Recipe
from pullfill.engine.demo_tokenizer import build_tokenizer, write_tokenizer

Progress = Callable[[float, str], None]
"""Called with the fraction done in [0, 1] and what is going on."""

TOKENS_PER_ROW = 256
ROWS = 4
WARM_STEPS = 60
_QUESTIONS = (
    "What does {} do?",
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "How does {} work?",
    "Write about {}.",
)


def train(recipe: Recipe, directory: Path, progress: Progress) -> None:
    """Train `recipe` and write weights and tokenizer into directory (which exists).

    Uses one thread of this process. Slow machines stop at `recipe.max_train_s` seconds.
    """
    progress(0.0, "reading the documentation of Python")
    entries = read_corpus()
    texts = list(documents(entries, random.Random(recipe.seed)))
    tokenizer = build_tokenizer(
        recipe.vocab, itertools.chain.from_iterable(entry.paragraphs for entry in entries)
    )
    write_tokenizer(tokenizer, recipe, directory)
    stream = torch.tensor(
        [i for enc in tokenizer.encode_batch(texts) for i in enc.ids], dtype=torch.int64
    )
    threads = torch.get_num_threads()
    # One: the same sums everywhere, and no threads that spin for a core others hold.
    torch.set_num_threads(1)
    try:
        # The last layer is not trained but added at the end.
        part = replace(recipe, layers=recipe.layers - 1)
        model = Llama(part, random_weights(part))
        for weight in model.weights.values():
            weight.requires_grad_()
        _warm_start(model, stream)
        _fit(model, stream, progress)
        with torch.no_grad():
            _stirred(model, recipe, stream).save(directory)
    finally:
        torch.set_num_threads(threads)
    progress(1.0, "trained")


def documents(entries: list[Entry], draw: random.Random) -> Iterator[str]:
    """Training texts: each entry as plain prose, and once more as a chat with a short answer."""
    order = list(entries)
    draw.shuffle(order)
    for entry in order:
        yield "\n".join(entry.paragraphs) + END_OF_TEXT
        question = draw.choice(_QUESTIONS).format(entry.name.rpartition(".")[2] or entry.name)
        answer = "\n".join(entry.paragraphs[:2])
        yield f"<|user|>{question}{TURN_END}<|assistant|>{answer}{TURN_END}{END_OF_TEXT}"


def _batches(stream: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of tokens [ROWS, TOKENS_PER_ROW + 1] and positions [ROWS, TOKENS_PER_ROW].

    Rows are short and prompts long: each row is cut into two runs with a random gap of positions
    between them, so that the model meets every distance up to max_positions without reading it.
    """
    draw = torch.Generator().manual_seed(recipe.seed)
    span = torch.arange(TOKENS_PER_ROW + 1)
    steps = torch.arange(TOKENS_PER_ROW)
    room = recipe.max_positions - TOKENS_PER_ROW
    while True:
        starts = torch.randint(len(stream) - TOKENS_PER_ROW, (ROWS, 1), generator=draw)
        cut = torch.randint(16, TOKENS_PER_ROW, (ROWS, 1), generator=draw)
        # Squares favour small gaps; a third of the rows has none.
        gap = (torch.rand(ROWS, 1, generator=draw) ** 2 * room).long()
        gap[::3] = 0
        yield stream[starts + span], steps + gap * (steps >= cut)


def _warm_start(model: Llama, stream: Tensor) -> None:
    """Fit the embeddings, alone, to which token follows which; the layers then start as no-ops.

    A few seconds of this full-batch fit are worth minutes of training the whole model from noise.
    """
    vocab = model.recipe.vocab
    pairs = stream[:-1] * vocab + stream[1:]
    counts = torch.bincount(pairs, minlength=vocab * vocab).view(vocab, vocab).float()
    share = counts / counts.sum()
    every = torch.arange(vocab)[None]
    optimizer = torch.optim.Adam([model.weights[EMBED], model.weights[HEAD]], lr=0.05)
    for step in range(WARM_STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / WARM_STEPS)
        predicted = functional.linear(model.hidden(every, layers=0)[0], model.weights[HEAD])
        loss = -(share * predicted.log_softmax(dim=-1)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, weight in model.weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()


def _fit(model: Llama, stream: Tensor, progress: Progress) -> None:
    recipe = model.recipe
    matrices = [w for n, w in model.weights.items() if w.dim() == 2 and "layers" in n]
    others = [w for n, w in model.weights.items() if w.dim() == 1 or "layers" not in n]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    )
    groups = [(group, group["lr"]) for opt in optimizers for group in opt.param_groups]
    # Where the CPU multiplies bfloat16 tiles it is several times faster; elsewhere slower.
    tiles = torch.cpu._is_amx_tile_supported()
    began = time.monotonic()
    smooth = 0.0
    batches = _batches(stream, recipe)
    for step in range(recipe.train_steps):
        done = max(step / recipe.train_steps, (time.monotonic() - began) / recipe.max_train_s)
        if done >= 1:
            break
        for group, rate in groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (1 - done) * 2)
        rows, positions = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=tiles):
            logits = model.logits(rows[:, :-1], positions)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        smooth += (loss.item() - smooth) * max(0.05, 1 / (step + 1))
        progress(done, f"training, step {step + 1} of {recipe.train_steps}, loss {smooth:.2f}")


def _stirred(model: Llama, recipe: Recipe, stream: Tensor) -> Llama:
    """`model` with the last layer of `recipe` added: random, sharp attention over everything.

    Scores have a standard deviation of 3: each head picks a few tokens anywhere in the context.
    What all hidden states share is projected out, so that picks differ and the mean stays.
    """
    last = recipe.layers - 1
    full = Llama(recipe, random_weights(recipe) | model.weights)
    sample = stream[: 8 * 1024].view(8, 1024)
    states = model.residual(sample)
    normed = functional.rms_norm(states, (recipe.hidden,))
    common = functional.normalize(normed.mean(dim=(0, 1)), dim=0)
    for part, spread in (("q", 3**0.5), ("k", 3**0.5), ("v", 1.0)):
        weight = full.weights[layer_name(last, f"self_attn.{part}_proj")]
        weight -= (weight @ common)[:, None] * common
        weight *= spread / functional.linear(normed, weight).std()
    full.weights[layer_name(last, "mlp.down_proj")].zero_()
    mix = full.weights[layer_name(last, "self_attn.o_proj")]
    # Control tokens stay as trained: where an answer ends is not for chance to say.
    control = (model.weights[HEAD][: len(SPECIAL_TOKENS)] * model.weights[NORM]).T
    basis = torch.linalg.qr(control).Q
    mix -= basis @ (basis.T @ mix)
    clean = model.logits(sample)
    chance = clean.softmax(dim=-1)
    for _ in range(4):  # the last norm makes it not quite linear
        change = full.logits(sample) - clean
        change -= (chance * change).sum(dim=-1, keepdim=True)
        mix *= recipe.stir / (chance * change**2).sum(dim=-1).mean().sqrt()
    return full
