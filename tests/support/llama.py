"""Llama in plain torch: a second opinion on the logits of a checkpoint. vLLM does the serving."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pullfill.demo.recipe import EMBED, HEAD, NORM, Recipe, layer_name

Cache = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class Llama:
    """The forward pass of `recipe` over `weights` (float32, by name), which it shares."""

    def __init__(self, recipe: Recipe, weights: dict[str, Tensor]) -> None:
        self.recipe = recipe
        self.weights = weights

    @staticmethod
    def load(recipe: Recipe, directory: Path) -> Llama:
        """Return the model saved in directory."""
        return Llama(recipe, dict(load_file(directory / "model.safetensors")))

    def logits(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits [batch, tokens, vocab] of ids [batch, tokens].

        cache: what was computed for the tokens before these. It is extended by these. After the
        first call, give one token at a time."""
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = self._rotary(torch.arange(start, start + ids.shape[1]))
        x = functional.embedding(ids, self.weights[EMBED])
        for layer in range(self.recipe.layers):
            x = x + self._attention(layer, x, cos, sin, cache)
            x = x + self._mlp(layer, x)
        return functional.linear(self._norm(x, NORM), self.weights[HEAD])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weights[name], self.recipe.norm_eps)

    def _linear(self, layer: int, part: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[layer_name(layer, part)])

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.recipe.head_dim, 2, dtype=torch.float32)
        rates = self.recipe.rope_theta ** -(exponents / self.recipe.head_dim)
        angles = (positions[:, None].float() * rates).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _attention(
        self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None
    ) -> Tensor:
        x = self._norm(x, layer_name(layer, "input_layernorm"))
        q, k, v = (
            self._linear(layer, f"self_attn.{part}_proj", x)
            .unflatten(-1, (-1, self.recipe.head_dim))
            .transpose(1, 2)
            for part in "qkv"
        )
        q, k = (_rotate(y, cos, sin) for y in (q, k))
        if cache is not None:
            if layer in cache:
                k, v = (
                    torch.cat((cache[layer][0], k), dim=2),
                    torch.cat((cache[layer][1], v), dim=2),
                )
            cache[layer] = k, v
        group = self.recipe.heads // self.recipe.kv_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self._linear(layer, "self_attn.o_proj", out.transpose(1, 2).flatten(2))

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        x = self._norm(x, layer_name(layer, "post_attention_layernorm"))
        gate = functional.silu(self._linear(layer, "mlp.gate_proj", x))
        return self._linear(layer, "mlp.down_proj", gate * self._linear(layer, "mlp.up_proj", x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
