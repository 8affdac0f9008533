"""Llama in plain torch, its weights named as in a Hugging Face checkpoint.

Used to train the demo model, to make random ones, and as a second opinion on their logits. Serving
is vLLM's business; this holds no KV cache.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pullfill.engine.demo_recipe import Recipe

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_name(layer: int, part: str) -> str:
    """Weight name of one part of one layer, e.g. `self_attn.q_proj`."""
    return f"model.layers.{layer}.{part}.weight"


def random_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Weights drawn from `recipe.seed`, the same on every call; norms are one."""
    wide, narrow = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    hidden, inner = recipe.hidden, recipe.intermediate
    draw = torch.Generator().manual_seed(recipe.seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * (recipe.init_range * scale)

    weights = {EMBED: matrix(recipe.vocab, hidden)}
    for layer in range(recipe.layers):
        parts = {
            "input_layernorm": torch.ones(hidden),
            # Half as strong: scores stay small, so attention looks at all of the context.
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


class Llama:
    """The forward pass of `recipe` over `weights` (float32, by name), which it shares."""

    def __init__(self, recipe: Recipe, weights: dict[str, Tensor]) -> None:
        self.recipe = recipe
        self.weights = weights

    @staticmethod
    def load(recipe: Recipe, directory: Path) -> Llama:
        """The model saved in directory."""
        from safetensors.torch import load_file

        return Llama(recipe, dict(load_file(directory / "model.safetensors")))

    def save(self, directory: Path) -> None:
        """Write `model.safetensors` into directory."""
        from safetensors.torch import save_file

        path = directory / "model.safetensors"
        save_file({name: w.detach() for name, w in self.weights.items()}, path, {"format": "pt"})
        path.chmod(0o644)

    def logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocab] of ids [batch, tokens].

        positions default to 0, 1, 2, …; attention is causal by index whatever they are.
        """
        return functional.linear(self.hidden(ids, positions), self.weights[HEAD])

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, layers: int | None = None
    ) -> Tensor:
        """Normed hidden states [batch, tokens, hidden] after the first `layers` (default all)."""
        return self._norm(self.residual(ids, positions, layers), NORM)

    def residual(
        self, ids: Tensor, positions: Tensor | None = None, layers: int | None = None
    ) -> Tensor:
        """What `hidden` norms."""
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
        cos, sin = self._rotary(positions)
        x = functional.embedding(ids, self.weights[EMBED])
        for layer in range(self.recipe.layers if layers is None else layers):
            x = x + self._attention(layer, x, cos, sin)
            x = x + self._mlp(layer, x)
        return x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weights[name], self.recipe.norm_eps)

    def _linear(self, layer: int, part: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[layer_name(layer, part)])

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.recipe.head_dim, 2, dtype=torch.float32)
        rates = self.recipe.rope_theta ** -(exponents / self.recipe.head_dim)
        angles = (positions[:, :, None].float() * rates).repeat(1, 1, 2)[:, None]
        return angles.cos(), angles.sin()

    def _attention(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self._norm(x, layer_name(layer, "input_layernorm"))
        q, k, v = (
            self._linear(layer, f"self_attn.{part}_proj", x)
            .unflatten(-1, (-1, self.recipe.head_dim))
            .transpose(1, 2)
            for part in "qkv"
        )
        q, k = (_rotate(y, cos, sin).to(v.dtype) for y in (q, k))
        group = self.recipe.heads // self.recipe.kv_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(layer, "self_attn.o_proj", out.transpose(1, 2).flatten(2))

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        x = self._norm(x, layer_name(layer, "post_attention_layernorm"))
        gate = functional.silu(self._linear(layer, "mlp.gate_proj", x))
        return self._linear(layer, "mlp.down_proj", gate * self._linear(layer, "mlp.up_proj", x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
