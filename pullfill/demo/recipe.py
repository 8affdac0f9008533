"""What a demo checkpoint is made of: a recipe, and the config files that follow from it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

FORMAT = 2
"""Part of every digest. Raise it when the tokenizer, the template or the weights change: then
machines with an older demo model make a new one."""

END_OF_TEXT, PAD, TURN_END = "<|endoftext|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
# No text gives these tokens, and decoding drops them. A turn is its role's token, the content and
# TURN_END.
SPECIAL_TOKENS = (END_OF_TEXT, PAD, TURN_END, *(f"<|{role}|>" for role in ROLES))
# These are text, one token each: tool parsers look for them in the decoded answer.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of a Llama in float32, and the seed and the scales of its random weights.

    head_dim: 32, 64, 80, 96, 112, 128 or another that the CPU attention of vLLM takes.
    init_range: standard deviation of the weights. With Llama's 0.02 a random model answers nearly
    the same whatever the prompt. That would hide wrong KV.
    embedding: times init_range for the embeddings. The smaller it is, the more the next token
    depends on the context, and the less on the last token alone.
    readable: answer in printable ASCII characters only, and sometimes end the answer.
    """

    hidden: int = 192
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 384
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_range: float = 0.05
    embedding: float = 1.0
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


DEMO = Recipe(init_range=0.2, embedding=0.1, readable=True)
"""The checkpoint behind `--model demo`."""
