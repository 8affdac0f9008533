"""A byte-level tokenizer and a chat template for checkpoints made on this machine.

All 256 bytes are tokens, so any text round-trips exactly. The other tokens are a fixed list of
pairs of letters, the same on every machine.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pullfill.demo.recipe import MARKUP_TOKENS, PAD, SPECIAL_TOKENS, TURN_END, Recipe

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


def build_tokenizer(vocab: int) -> Tokenizer:
    """Make a tokenizer of exactly `vocab` tokens, the same on every machine.

    Special tokens come first, from id 0. Then come all bytes, common pairs of letters, and markup.
    Raises ValueError if vocab is too small for the bytes, or larger than the pairs at hand."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # 'Ġ' is a space in the byte alphabet: " t", then "th", "er", and so on.
    pairs = itertools.chain(
        itertools.product("Ġ", "taoiswcbpfmdrlehngu"),
        itertools.product("tsnrlhdcmfpgbvwk", "eaiouy"),
        itertools.product("eaiou", "nrstlmdcg"),
        itertools.product("tscn", "htkdg"),
    )
    room = vocab - len(MARKUP_TOKENS) - len(tokens)
    merges = list(dict.fromkeys(pairs))[: max(0, room)]
    tokens += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab {vocab} cannot be had: there are {tokenizer.get_vocab_size()}")
    return tokenizer


def readable(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of printable ASCII text, and the one that ends an answer."""
    found = [SPECIAL_TOKENS.index(TURN_END)]
    for token, name in enumerate(map(tokenizer.id_to_token, range(tokenizer.get_vocab_size()))):
        text = tokenizer.decode([token])
        if name not in MARKUP_TOKENS and text.isascii() and text.isprintable() and text:
            found.append(token)
    return found


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
