"""What a demo checkpoint is made of: a recipe, and the config files and weights that follow."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # loaded only by those who make weights
    from torch import Tensor
from collections.abc import Sequence

# Part of every digest. Raise it when the tokenizer, the template or the weights change: then
# machines with an older demo model make a new one.
FORMAT = 2

END_OF_TEXT, PAD, TURN_END = "<|endoftext|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
# No text gives these tokens, and decoding drops them. A turn is its role's token, the content and
# TURN_END.
SPECIAL_TOKENS = (END_OF_TEXT, PAD, TURN_END, *(f"<|{role}|>" for role in ROLES))
# These are text, one token each: tool parsers look for them in the decoded answer.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of a Llama in float32, and the seed and the scales of its random weights."""

    hidden: int = 192
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    # 32, 64, 80, 96, 112, 128 or another that the CPU attention of vLLM takes.
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 384
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    # Standard deviation of the weights. With Llama's 0.02 a random model answers nearly the same
    # whatever the prompt. That would hide wrong KV.
    init_range: float = 0.05
    # Times init_range for the embeddings. The smaller it is, the more the next token depends on the
    # context, and the less on the last token alone.
    embedding: float = 1.0
    # Answer in printable ASCII characters only, and sometimes end the answer.
    readable: bool = False
    seed: int = 20

    def digest(self) -> str:
        """Return a hash of the recipe."""
        text = msgspec.json.encode({"format": FORMAT, **asdict(self)}, order="deterministic")
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def hf_config(self) -> dict[str, Any]:
        """Return `config.json` of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
        }

    def generation_config(self) -> dict[str, Any]:
        """Return `generation_config.json`: the end of an answer, and how it is sampled."""
        return {
            "eos_token_id": [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
        }


# The checkpoint behind `--model demo`.
DEMO = Recipe(init_range=0.2, embedding=0.1, readable=True)


EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_name(layer: int, part: str) -> str:
    """Return the name of a weight. part: e.g. `self_attn.q_proj`."""
    return f"model.layers.{layer}.{part}.weight"


def random_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Return weights drawn from `recipe.seed`, the same on every call. Those of norms are one."""
    import torch

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
    import torch

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
