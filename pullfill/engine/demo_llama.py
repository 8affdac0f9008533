"""Llama in plain torch, with the parameter names of a Hugging Face checkpoint.

Used to train the demo model, to make random ones, and as a second opinion on their logits. Serving
is vLLM's business; this holds no KV cache.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from pullfill.engine.demo_recipe import Recipe


def _rotary(recipe: Recipe, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [batch, 1, tokens, head_dim], for integer positions [batch, tokens]."""
    exponents = torch.arange(0, recipe.head_dim, 2, dtype=torch.float32) / recipe.head_dim
    angles = positions[:, :, None].float() * recipe.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.shape = recipe
        wide, narrow = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden, wide, bias=False)
        self.k_proj = nn.Linear(recipe.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(recipe.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, recipe.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)

        q = _rotate(split(self.q_proj(x)), cos, sin)
        k = _rotate(split(self.k_proj(x)), cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, split(self.v_proj(x))))
        out = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.up_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.down_proj = nn.Linear(recipe.intermediate, recipe.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(recipe.hidden, eps=recipe.norm_eps)
        self.self_attn = _Attention(recipe)
        self.post_attention_layernorm = nn.RMSNorm(recipe.hidden, eps=recipe.norm_eps)
        self.mlp = _Mlp(recipe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Body(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocab, recipe.hidden)
        self.layers = nn.ModuleList(_Layer(recipe) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.hidden, eps=recipe.norm_eps)


class Llama(nn.Module):
    """A decoder of `recipe`'s shape, its weights drawn from `recipe.seed` (same on every call)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = _Body(recipe)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocab, bias=False)
        draw = torch.Generator().manual_seed(recipe.seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    sharp = name.endswith(("q_proj.weight", "k_proj.weight"))
                    weight.normal_(0, recipe.init_range / (2 if sharp else 1), generator=draw)
        if recipe.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normed last hidden states [batch, tokens, hidden] of ids [batch, tokens].

        positions default to 0, 1, 2, …; attention is causal by index whatever they are.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
        cos, sin = _rotary(self.recipe, positions)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocab] of ids [batch, tokens]."""
        logits: Tensor = self.lm_head(self.hidden(ids, positions))
        return logits

    def save(self, directory: Path) -> None:
        """Write `model.safetensors` into directory."""
        from safetensors.torch import save_file

        weights = {name: weight.contiguous() for name, weight in self.state_dict().items()}
        if self.recipe.tied:
            del weights["lm_head.weight"]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    @staticmethod
    def load(recipe: Recipe, directory: Path) -> Llama:
        """The model whose weights lie in directory. Raises RuntimeError when they do not fit."""
        from safetensors.torch import load_file

        model = Llama(recipe)
        weights = load_file(directory / "model.safetensors")
        if recipe.tied:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
        return model.eval()
