"""A byte-level tokenizer and a chat template for checkpoints made on this machine.

All 256 bytes are tokens, so any text round-trips exactly. What is merged above that is learned from
texts when there are some, else it is a fixed list of letter pairs, the same on every machine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pullfill.engine.demo_recipe import (
    MARKUP_TOKENS,
    PAD,
    SPECIAL_TOKENS,
    TURN_END,
    Recipe,
)

CHAT_TEMPLATE = """\
{%- macro body(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}
    {%- for part in content -%}{{ part.text if part.type == 'text' }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] if messages else none -%}
{%- set has_system = first is not none and first.role in ('system', 'developer') -%}
{%- if has_system or tools -%}
  {{- '<|system|>' -}}
  {%- if has_system -%}{{ body(first.content) }}{%- endif -%}
  {%- if tools -%}
    {{- '\\n' if has_system -}}
    {{- 'Functions you may call, one JSON schema each:\\n<tools>' -}}
    {%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
    {{- '\\n</tools>\\nTo call one, answer\\n<tool_call>\\n' -}}
    {{- '{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|tool|><tool_response>\\n' ~ body(message.content) ~ '\\n</tool_response><|end|>' -}}
  {%- elif not (loop.first and has_system) -%}
    {%- set known = message.role in ('system', 'user', 'assistant') -%}
    {{- '<|' ~ (message.role if known else 'user') ~ '|>' ~ body(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- set arguments = function.arguments -%}
      {{- '\\n' if message.content or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' -}}
      {{- arguments if arguments is string else (arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def build_tokenizer(vocab: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """Exactly `vocab` tokens: special ones from id 0, then bytes, then merges.

    Raises ValueError when vocab is too small for the bytes or larger than the merges at hand.
    """
    markup = len(MARKUP_TOKENS)
    least = 256 + len(SPECIAL_TOKENS) + markup
    if vocab < least:
        raise ValueError(f"vocab {vocab} is too small: bytes and special tokens need {least}")
    if texts is None:
        tokenizer = _fixed(vocab - markup)
    else:
        tokenizer = _learned(vocab - markup, texts)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"{vocab} tokens asked, {tokenizer.get_vocab_size()} made: too few texts")
    return tokenizer


def _fixed(size: int) -> Tokenizer:
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # 'Ġ' is a space in the byte alphabet: " t", then "th", "er", and so on.
    pairs = itertools.chain(
        itertools.product("Ġ", "taoiswcbpfmdrlehngu"),
        itertools.product("tsnrlhdcmfpgbvwk", "eaiouy"),
        itertools.product("eaiou", "nrstlmdcg"),
        itertools.product("tscn", "htkdg"),
    )
    seen = dict.fromkeys(pairs)
    merges = list(seen)[: size - len(tokens)]
    tokens += [a + b for a, b in merges]
    return Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))


def _learned(size: int, texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, recipe: Recipe, directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into directory."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "model_max_length": recipe.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
