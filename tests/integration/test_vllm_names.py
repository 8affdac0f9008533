"""Names and objects that unit tests fake: here they are vLLM's own. No engine is started."""

from __future__ import annotations

import ast
import gc
import os
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pullfill
from pullfill.deploy import vllm_flags
from pullfill.engine import features, front_wire
from pullfill.engine.args import build_config, flag_parser
from pullfill.engine.kv import attention_of_rank
from pullfill.engine.requests import UNTRACKED, own_request, prepare
from pullfill.errors import BadMessage, ConfigError
from tests.support.features import feature
from tests.support.prompts import random_prompt
from tools.vllm_names import missing


def test_flags_and_the_platform_are_looked_at_before_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    def build(*flags: str) -> Any:
        return build_config(str(tmp_path), flags, kv_role="kv_both", engine_id="e")

    with pytest.raises(ConfigError, match="--enable-sleep-mode: its memory"):
        build("--enable-sleep-mode")
    file = tmp_path / "vllm.yaml"  # it hides flags from who starts workers
    for flag, told in (("data", "data_parallel"), ("tensor", "as --tensor-parallel")):
        file.write_text(f"{flag}-parallel-size: 2\n")
        with pytest.raises(ConfigError, match=told):
            build("--config", str(file))
    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        build()


@pytest.mark.parametrize(("flags", "overlap"), [([], False), (["--async-scheduling"], True)])
def test_steps_overlap_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], overlap: bool
) -> None:
    """vLLM's CPU build never lets them overlap, so the configuration is not made here."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    asked: list[bool | None] = []

    def make(engine_args: AsyncEngineArgs) -> None:
        asked.append(engine_args.async_scheduling)
        raise ValueError("that is all")

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", make)
    with pytest.raises(ConfigError, match="that is all"):
        build_config(str(tmp_path), flags, kv_role="kv_both", engine_id="e")
    assert asked == [overlap]


def test_the_names_of_all_flags_are_known() -> None:
    """A flag whose name is not known is refused before vLLM is imported."""
    from vllm.entrypoints.cli.serve import make_arg_parser

    options = [o for a in make_arg_parser(flag_parser("up"))._actions for o in a.option_strings]
    names = {option.replace("--no-", "--") for option in options} - {"-h", "--help"}
    # vLLM 0.33 takes `--disable-x` for `--enable-x`, and the other way round, but not of these.
    none = {"--enable-access-log-for-endpoints", "--enable-log-stats"}
    assert vllm_flags.of_vllm()[0] - none == names


def test_workers_are_given_no_flag_of_vllms_api_server() -> None:
    """A worker refuses such a flag. So `up --enable-scale-out` never became ready."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser

    server, worker = (
        {option for action in parser._actions for option in action.option_strings}
        for parser in (
            make_arg_parser(flag_parser("server")),
            AsyncEngineArgs.add_cli_args(flag_parser("worker")),
        )
    )
    # Parsers read a file of --config on their own. --host and --port are ours.
    taken = {"--config", "--host", "--port"}
    for flag in server - worker - taken:
        with suppress(ConfigError):  # refused before any process starts
            vllm_flags.check([flag, "1"])
            assert not vllm_flags.for_worker([flag, "1"]), flag


def test_kv_scales_are_where_vllm_keeps_them() -> None:
    """They are private to vLLM's layers, and a layer without them counts as unscaled."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer: Any = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: "A")
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"l": layer})
    )
    found = attention_of_rank(config, ["l", "shared with another"])
    assert found.scales == {("l", (1.0,), (1.0,))}


@pytest.mark.essential
def test_the_installed_vllm_has_every_name() -> None:
    """What is listed, and what is imported, also in functions that no test runs."""
    assert missing() == []
    bad = "Nothing", "FrontendHello:nothing", "FrontendCodec.nothing", "HELO:field"
    assert len(missing({"pullfill.engine.front_wire": ("FrontendHello:model", *bad)})) == len(bad)
    walk = os.walk(Path(pullfill.__file__).parent, followlinks=True)  # the rooms are links
    files = [Path(top, name) for top, _, names in walk for name in names if name.endswith(".py")]
    imported = {
        (str(node.module), alias.name, file)
        for file in files
        if file.parent.name != "release"  # a module there may import what only its release has
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) > 50, "where are they?"
    assert {
        (module, name, file) for module, name, file in imported if not has(module, name)
    } == set()


def has(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    with suppress(ImportError):
        return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    return False


# --------------------------------------------------------------------------
# What the intake makes of a prompt: the request that vLLM would have made.


@pytest.mark.parametrize("length", [0, 5, 16, 5000])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_prepared_request_has_the_block_hashes_of_vllm(length: int, salt: str | None) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    init_none_hash(sha256)

    class Core:
        mm_receiver_cache = None
        request_block_hasher = staticmethod(get_request_block_hasher(16, sha256))
        preprocess_add_request = EngineCore.preprocess_add_request

    core: Any = Core()
    sent = own_request(
        "r", random_prompt(length, seed=1), cache_salt=salt, priority=0, arrival_time=0.0
    )
    request, tokens = front_wire.WorkerCodec().request(front_wire.FrontendCodec().encode(sent))
    assert not request.prompt_token_ids
    made = prepare(core, request, tokens)
    plain = Request.from_engine_core_request(sent, core.request_block_hasher)
    assert made.prompt_token_ids == plain.prompt_token_ids
    assert list(made.all_token_ids) == list(plain.all_token_ids)
    assert made.block_hashes == plain.block_hashes
    assert len(made.block_hashes) == length // 16
    lists = (made.prompt_token_ids, made._all_token_ids, made.block_hashes)
    long = length > UNTRACKED
    assert not (long and any(map(gc.is_tracked, lists))), "100 prompts cost 0.3 s a collection"
    for request in (made, plain):
        request.append_output_token_ids(list(range(20)))
    assert made.block_hashes == plain.block_hashes, "the answer's blocks are hashed as well"


def test_a_prompt_of_embeddings_is_taken() -> None:
    """It has no token ids: with an empty list of them vLLM would refuse it."""
    import torch
    from vllm.v1.request import Request

    sent = own_request("r", (), cache_salt=None, arrival_time=0.0)
    sent.prompt_token_ids, sent.prompt_embeds = None, torch.zeros(5, 8)
    request, tokens = front_wire.WorkerCodec().request(front_wire.FrontendCodec().encode(sent))

    class Core:
        def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
            return Request.from_engine_core_request(request, None), 0

    made = prepare(Core(), request, tokens)
    assert (made.prompt_token_ids, made.num_prompt_tokens) == (None, 5)


# --------------------------------------------------------------------------
# Multimodal inputs arrive at a prefill worker as they were, and what is none is refused.


@pytest.mark.essential
def test_what_a_prefill_worker_decodes_is_what_was_encoded() -> None:
    made = [feature(0, 4), feature(6, 3, modality="video", nbytes=4000)]
    found = features.decode(features.encode(made)[0], tokens=9)
    assert found == made
    assert torch.equal(found[1].data["pixels"].data, made[1].data["pixels"].data)
    assert features.may_go(made, tokens=9)
    assert features.nbytes(made) == 4300


@cache
def good() -> bytes:
    return features.encode([feature(0, 4), feature(4, 4)])[0]


@given(st.data())
def test_what_is_not_features_is_a_bad_message_by_hypothesis(draw: st.DataObject) -> None:
    at, byte = draw.draw(st.integers(0, len(good()) - 1)), draw.draw(st.integers(0, 255))
    changed = good()[:at] + bytes([byte]) + good()[at + 1 :]
    data = draw.draw(st.sampled_from([changed, good()[:at]]) | st.binary(max_size=200))
    try:
        found = features.decode(data, tokens=8)
    except BadMessage:
        return
    assert all(f.mm_position.offset + f.mm_position.length <= 8 for f in found)


def test_positions_beyond_the_prompt_and_empty_features_are_refused() -> None:
    for made in ([feature(5, 4)], [feature(-1, 2)], [feature(0, 2, nbytes=0)]):
        with pytest.raises(BadMessage, match="not where the prompt is"):
            features.decode(features.encode(made)[0], tokens=8)


pytestmark = pytest.mark.engine
