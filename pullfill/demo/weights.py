"""Makes random weights of a Llama, named as in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pullfill.demo.recipe import Recipe

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_name(layer: int, part: str) -> str:
    """Return the name of a weight. part: e.g. `self_attn.q_proj`."""
    return f"model.layers.{layer}.{part}.weight"


def random_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Return weights drawn from `recipe.seed`, the same on every call. Those of norms are one."""
    wide, narrow = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    hidden, inner = recipe.hidden, recipe.intermediate
    draw = torch.Generator().manual_seed(recipe.seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * (recipe.init_range * scale)

    weights = {EMBED: matrix(recipe.vocab, hidden, recipe.embedding)}
    for layer in range(recipe.layers):
        parts = {
            "input_layernorm": torch.ones(hidden),
            # Half the scale for queries and keys, so that attention looks at all of the context.
            "self_attn.q_proj": matrix(wide, hidden, 0.5),
            "self_attn.k_proj": matrix(narrow, hidden, 0.5),
            "self_attn.v_proj": matrix(narrow, hidden),
            "self_attn.o_proj": matrix(hidden, wide),
            "post_attention_layernorm": torch.ones(hidden),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        weights |= {layer_name(layer, part): weight for part, weight in parts.items()}
    return weights | {NORM: torch.ones(hidden), HEAD: matrix(recipe.vocab, hidden)}


def answer_only(weights: dict[str, Tensor], tokens: Sequence[int]) -> None:
    """Change the weights so that the model answers with these tokens only."""
    # The first of the hidden numbers becomes a positive constant: each embedding has it, and no
    # layer adds to it. To the logit of every other token it adds a large negative number.
    weights[EMBED][:, 0] = 3 * weights[EMBED].std()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    head = weights[HEAD]
    others = torch.ones(len(head), dtype=torch.bool)
    others[list(tokens)] = False
    head[others] = 0
    head[:, 0] = -10_000 * others
