"""Random-weight checkpoints for tests that run real engines: small, float32, made in a second.

Their answers depend on every part of the prompt, so one wrong KV block shows in the tokens or at
least in the logprobs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from pullfill.demo.checkpoint import ensure_demo_model
from pullfill.demo.recipe import Recipe

TINY = Recipe(
    hidden=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=256,
    vocab=384,
    init_range=0.2,
    seed=7,
)


def tiny_checkpoint(recipe: Recipe = TINY) -> Path:
    """Directory of the checkpoint, made unless a test run of this user made it before."""
    return ensure_demo_model(_cache_dir() / f"tiny-{recipe.digest()}", recipe)


def _cache_dir() -> Path:
    directory = Path(tempfile.gettempdir()) / f"pullfill-tests-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """Directory of that name, which `make` fills unless it is there. Several processes may ask."""
    target = _cache_dir() / name
    if not target.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        make(fresh)
        try:
            fresh.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    return target


IMAGE, IMAGE_ID = "<tool_call>", 380
"""The token of the tiny checkpoint that stands for a part of an image."""
_MAKE = """
import json, sys, torch, transformers
config, model = (getattr(transformers, name) for name in sys.argv[1:3])
torch.manual_seed(7)
made = model(config(**json.loads(sys.argv[3]))).float()
# Else norms and biases are all 1 or 0, whatever initializer_range says.
for parameter in made.parameters():
    if parameter.dim() == 1:
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
made.save_pretrained(sys.argv[4])
"""


def random_checkpoint(
    config: str, model: str, processor: dict[str, object] | None = None, **fields: object
) -> Path:
    """Directory of a checkpoint with random weights, made unless it is there.

    It has the tokenizer of the tiny checkpoint.

    config, model: names of classes of transformers.
    processor: of images: what processor_config.json holds. Then one token is called <image>.
    fields: of the config."""
    made_of = {"config": config, "make": _MAKE, "processor": processor, **fields}
    digest = blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=8).hexdigest()

    def make(fresh: Path) -> None:
        command = [sys.executable, "-c", _MAKE, config, model, json.dumps(fields), str(fresh)]
        subprocess.run(command, check=True, capture_output=True)
        for file in tiny_checkpoint().glob("*token*"):
            text = file.read_text()
            (fresh / file.name).write_text(text.replace(IMAGE, "<image>") if processor else text)
        if processor:
            (fresh / "processor_config.json").write_text(json.dumps(processor))

    return _made(f"{model}-{digest}", make)


def scaled_checkpoint(first: float) -> Path:
    """Directory of the tiny checkpoint with scales of an fp8 KV cache, made unless it is there.

    first: the scale of V in the first layer. The fingerprint is the same for all, because it reads
    samples of the weights only."""
    from safetensors.torch import load_file, save_file
    from torch import tensor

    def make(fresh: Path) -> None:
        shutil.copytree(tiny_checkpoint(), fresh, dirs_exist_ok=True)
        weights = load_file(fresh / "model.safetensors")
        for layer in range(TINY.layers):
            weights[f"model.layers.{layer}.self_attn.k_scale"] = tensor(0.02)
            weights[f"model.layers.{layer}.self_attn.v_scale"] = tensor(0.04 if layer else first)
        save_file(weights, fresh / "model.safetensors", {"format": "pt"})
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        config = json.loads((fresh / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {**scheme, "symmetric": True},
        }
        (fresh / "config.json").write_text(json.dumps(config))

    return _made(f"tiny-{TINY.digest()}-scaled-{first}", make)
