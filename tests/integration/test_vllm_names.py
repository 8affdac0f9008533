"""Names of vLLM that unit tests fake: here they are vLLM's own. No engine is started."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pullfill
from pullfill.deploy import vllm_flags
from pullfill.engine.args import build_config, flag_parser, flags_read
from pullfill.engine.kv import attention_of_rank, device_of, executor_without_model
from pullfill.errors import ConfigError
from tests.support.chart import pods, render, the_container
from tests.support.flags import split
from tests.support.late import Late
from tools.vllm_names import missing

torch: Any = Late("torch")


def test_flags_and_the_platform_are_looked_at_before_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    def build(*flags: str) -> Any:
        return build_config(str(tmp_path), flags, kv_role="kv_both", engine_id="e")

    with pytest.raises(ConfigError, match="--enable-sleep-mode: its memory"):
        build("--enable-sleep-mode")
    with pytest.raises(ConfigError, match="--enable-cumem-allocator: its memory"):
        build("--enable-cumem-allocator")
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
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    options = [o for a in make_arg_parser(flag_parser("up"))._actions for o in a.option_strings]
    names = {option.replace("--no-", "--") for option in options} - {"-h", "--help"}
    assert vllm_flags.of_vllm()[0] == names


def test_workers_are_given_no_flag_of_vllms_api_server() -> None:
    """A worker refuses such a flag. So `up --enable-scale-out` never became ready."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

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


def test_vllms_own_parsers_take_the_flags_of_the_chart() -> None:
    """Unit tests know only the names of these flags."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    worker = AsyncEngineArgs.add_cli_args(flag_parser("worker"))
    frontend = make_arg_parser(flag_parser("frontend"))
    for template in pods(render(otlpTracesEndpoint="http://collector:4317")).values():
        arguments = the_container(template)["args"]
        if arguments[0] in ("decode", "prefill", "frontend"):
            ours, rest = split(arguments)
            parser = frontend if arguments[0] == "frontend" else worker
            parsed = parser.parse_args(["--model", ours["model"], *rest])
            assert parsed.served_model_name == ["qwen"]
            assert parsed.otlp_traces_endpoint == "http://collector:4317"
            with pytest.raises(ConfigError, match="--enforce-eagr"), flags_read():
                parser.parse_args(["--model", ours["model"], *rest, "--enforce-eagr"])


def test_kv_scales_are_where_vllm_keeps_them() -> None:
    """They are private to vLLM's layers, and a layer without them counts as unscaled."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer: Any = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: "A")
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"l": layer})
    )
    assert attention_of_rank(config, ["l"]).scales == {("l", (1.0,), (1.0,))}


def test_vllms_flag_names_the_mock_and_the_mock_has_no_model() -> None:
    named = "pullfill.testing.mock_executor.MockExecutor"
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=named),
        additional_config={"mock": {"device": "cuda"}},
    )
    assert executor_without_model(config).KV_KIND == "mock"
    assert device_of(config) == "cuda"


def test_the_mock_needs_no_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the connector has none. `meta` stands for the GPU: a device without memory."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pullfill.testing import mock_executor

    registered: dict[str, Any] = {}
    connector = SimpleNamespace(
        get_mem_pool_context=lambda: None, register_kv_caches=registered.update
    )
    monkeypatch.setattr(KVConnectorFactory, "create_connector", lambda **_: connector)
    monkeypatch.setattr(mock_executor, "device_of", lambda config: "meta")
    made = mock_executor.MockExecutor.__new__(mock_executor.MockExecutor)
    made.vllm_config = SimpleNamespace(kv_transfer_config=object())
    spec = SimpleNamespace(block_size=16, head_size=8, num_kv_heads=1, dtype=torch.bfloat16)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    made.initialize_from_config([SimpleNamespace(kv_cache_groups=[group], num_blocks=3)])
    assert {name: (t.device.type, t.shape) for name, t in registered.items()} == {
        name: ("meta", (3, 1, 16, 16)) for name in ("a", "b")
    }


@pytest.mark.essential
def test_the_installed_vllm_has_every_name() -> None:
    """What is listed, and what is imported, also in functions that no test runs."""
    assert missing() == []
    bad = "Nothing", "FrontendHello:nothing", "FrontendCodec.nothing", "HELO:field"
    assert len(missing([{"pullfill.engine.front_wire": ("FrontendHello:model", *bad)}])) == len(bad)
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
