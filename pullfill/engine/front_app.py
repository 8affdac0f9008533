"""vLLM's own OpenAI app and AsyncLLM, unmodified, on top of `DecodeClient`.

Call `set_environment` before anything imports vLLM. `prepare` parses vLLM's flags and reads the
model's configuration. It is slow and blocks, so call it without an event loop. `FrontApp.build`
makes the AsyncLLM and the FastAPI app on the running loop. No engine is started and no weights are
loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from starlette.routing import Match

from pullfill.engine.args import flag_parser, flags_read, model_read
from pullfill.errors import ConfigError
from pullfill.runtime import log

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.applications import Starlette

    from pullfill.engine.front_adapters import Board
    from pullfill.engine.front_client import DecodeClient, DecodePort

_log = log.get("engine.front_app")
# vLLM's routes, in its development mode, that put an engine to sleep, pause it, change its weights
# or call into it. They fail where there are many engines, so they are not served. One beside them,
# which aborts the requests of this frontend, works. `serve.dev.rlhf` is `rl` in vLLM 0.31.
_OF_ONE_ENGINE = tuple(
    f"vllm.entrypoints.{name}."
    for name in ("rl", "serve.dev.rlhf", "serve.dev.rpc", "serve.dev.sleep")
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Parsed flags and the configuration that they make.

    names: the served model names.
    never: why no answer can migrate with these flags. Empty: nothing prevents it."""

    args: Namespace
    config: Any
    names: tuple[str, ...]
    never: str


def answer_id(state: Mapping[str, Any]) -> str:
    """Return the `id` of the answer to an HTTP request. Empty: it is not known yet.

    state: of the request (ASGI). vLLM's routes note the id there before they generate."""
    return str(getattr(state.get("request_metadata"), "request_id", ""))


def set_environment(model: str) -> None:
    """Set the environment of a frontend before vLLM is imported. What the user set stays."""
    # A frontend multiplies no matrices.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Each choice of an answer is a request of its own. vLLM would accept 16384 and submit them in
    # one turn of the event loop. That takes so long that workers count the frontend as dead.
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", "128")
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare(model: str, vllm_args: Sequence[str]) -> Prepared:
    """Parse vLLM's server flags and read the model's config and generation defaults.

    Flags that only concern an engine are accepted and unused, so that all roles can be given the
    same ones. Raises ConfigError (bad flag, bad model path)."""
    from pullfill.engine import migration

    _do_without_device()
    args = _parse(model, vllm_args)
    from vllm.config import LoRAConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams

    with model_read(model):
        engine_args = AsyncEngineArgs.from_cli_args(args)
        model_config = engine_args.create_model_config()
        if model_config.runner_type == "pooling":
            raise ConfigError(f"{model!r} is a pooling model: name one that generates text")
        model_config.quantization = None  # weights are the workers' business
        structured = engine_args.structured_outputs_config
        for flag in ("reasoning_parser", "reasoning_parser_plugin"):
            if value := getattr(engine_args, flag):
                setattr(structured, flag, value)  # vLLM 0.31 has no function for it
        config = VllmConfig(
            model_config=model_config,
            structured_outputs_config=structured,
            observability_config=engine_args.create_observability_config(),
            # More than one engine: so each request brings its multimodal inputs, and none refers
            # to what another worker was sent.
            parallel_config=ParallelConfig(_api_process_count=2),
            lora_config=LoRAConfig() if args.enable_lora else None,  # only that there is one counts
        )
        # For vLLM's metrics of drafts, and its check of sampling parameters. Set afterwards: the
        # rest of the config is not that of an engine.
        ranks = ParallelConfig()
        ranks.tensor_parallel_size = args.tensor_parallel_size
        config.speculative_config = engine_args.create_speculative_config(model_config, ranks)
    for name in ("stream_interval", "max_num_queued_reqs", "max_num_queued_tokens"):
        value = getattr(args, name, None)
        if value is not None and hasattr(config.scheduler_config, name):
            setattr(config.scheduler_config, name, value)
    served = args.served_model_name or [args.model]
    names = tuple([served] if isinstance(served, str) else served)
    never = migration.why_never(args, SamplingParams.__struct_fields__)
    return Prepared(args, config, names, never)


def _do_without_device() -> None:
    """Let vLLM take the CPU for its platform where it finds none.

    Its CUDA build finds none on a host without a GPU, and then makes no configuration. Call it
    before other modules of vLLM are imported: they keep the platform that they find."""
    from vllm import platforms

    if not platforms.current_platform.device_type:
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()


def _parse(model: str, vllm_args: Sequence[str]) -> Namespace:
    # Defined in `launchers.cli_args`, and from vLLM 0.33 on in `common.cli_args`.
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(flag_parser("pullfill frontend"))
    # Users of prefix caching want to see it. vLLM leaves this off.
    parser.set_defaults(enable_prompt_tokens_details=True)
    with flags_read():
        args: Namespace = parser.parse_args(["--model", model, *vllm_args])
        validate_parsed_serve_args(args)
    return args


@dataclass(slots=True)
class FrontApp:
    """The assembled server.

    app: has vLLM's routes.
    client: takes the outputs of all workers."""

    app: FastAPI
    engine: Any
    client: DecodeClient
    _watch: asyncio.Task[None]

    @staticmethod
    async def build(
        prepared: Prepared, port_of: Callable[[DecodeClient], DecodePort], board: Board
    ) -> FrontApp:
        """Make AsyncLLM and the app on the running loop.

        port_of: makes the port. It must not deliver outputs before this returns.
        board: the LoRA adapters of the cluster."""
        from vllm import envs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.v1.executor import Executor

        from pullfill.engine import front_patches
        from pullfill.engine.front_client import DecodeClient, FrontLLM

        args, config = prepared.args, prepared.config
        engine = FrontLLM(
            lambda processor, renderer: DecodeClient(config, processor, renderer, port_of, board),
            vllm_config=config,
            executor_class=Executor,
            log_stats=not args.disable_log_stats,
            log_requests=args.enable_log_requests,
        )
        client = engine.engine_core
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        modules = [getattr(getattr(r, "endpoint", ""), "__module__", "") for r in app.router.routes]
        app.router.routes[:] = [
            route
            for route, module in zip(app.router.routes, modules, strict=True)
            if not module.startswith(_OF_ONE_ENGINE) or route.path == "/abort_requests"
        ]
        await init_app_state(engine, app.state, args, tasks)
        front_patches.settle_errors(app.state)
        front_patches.tell_failures(app.state, engine)
        client.adapters.follow(app.state.openai_serving_models)
        # vLLM's error handler sets `should_exit` when it believes that the engine is dead. Nobody
        # reads it: our server has many engines and its own life.
        app.state.server = SimpleNamespace(should_exit=False)
        # As in an engine: vLLM asks for environment variables at each token.
        envs.enable_envs_cache()
        watch = asyncio.create_task(_keep_output_handler(engine), name="frontend-output-watch")
        return FrontApp(app, engine, client, watch)

    async def close(self) -> None:
        """Stop AsyncLLM. Requests still open end with an error."""
        self._watch.cancel()
        self.engine.shutdown()


def has_route(app: Starlette, scope: Any) -> bool:
    """Whether the app has a route for the path of a request, or redirects it to one. It may be for
    another method."""
    path: str = scope["path"]
    other = path.rstrip("/") if path.endswith("/") else f"{path}/"
    scopes = [{**scope, "path": each} for each in (path, other)]
    return any(r.matches(s)[0] is not Match.NONE for s in scopes for r in app.router.routes)


async def _keep_output_handler(engine: Any) -> None:
    """Restart AsyncLLM's output task if it fails on an output, so that new requests still work.

    vLLM ends the open requests then."""
    while True:
        task = engine.output_handler
        if task is not None:
            await asyncio.wait([task])
            if task.cancelled():
                return
            _log.error("vLLM's output handler ended; its open requests failed. Starting it again")
            engine.output_handler = None
        engine._run_output_handler()
