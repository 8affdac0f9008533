"""Reads the user's vLLM flags, and checks them before anything starts. A refusal is one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches

from pullfill.config import NO_DATA_PARALLEL
from pullfill.errors import ConfigError
from pullfill.options import ClusterOptions, FrontendOptions, UpOptions, WorkerOptions, declared

_DATA_PARALLEL = re.compile(r"data-parallel\b|dp[a-z]?\Z|dp-supervisor\b")
_SIZE = ("data-parallel-size", "dp")
_FEW = 4
# Flags that are no fields of an options class.
_OF_UP = frozenset(
    ("--file", "--detach", "--vllm-args", "--decode-args", "--prefill-args", "--set", "--help")
)

# Flags of vLLM's API server. Workers do not have one.
# A test compares them with vLLM's parsers (`tests/integration/test_vllm_names.py`).
FRONTEND_ONLY = frozenset(
    """
    allow-credentials allowed-headers allowed-methods allowed-origins
    anthropic-disabled-thinking-effort api-key chat-template chat-template-content-format
    cohere-format cohere-is-reasoning-model default-chat-template-kwargs
    disable-access-log-for-endpoints disable-fastapi-docs disable-uvicorn-access-log
    enable-auto-tool-choice enable-flash-late-interaction enable-force-include-usage
    enable-log-deltas enable-log-outputs enable-log-requests enable-offline-docs
    enable-per-request-metrics enable-prompt-tokens-details enable-request-id-headers
    enable-scale-out enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    exclude-tools-when-tool-choice-none fingerprint-mode fingerprint-value h11-max-header-count
    h11-max-incomplete-event-size log-error-stack lora-modules max-log-len middleware response-role
    return-tokens-as-token-ids root-path sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs
    ssl-certfile ssl-ciphers ssl-keyfile tokens-only tool-call-parser tool-parser-plugin tool-server
    tool-strict-level trust-request-chat-template trust-request-mm-kwargs uvicorn-log-level
    """.split()
)
# Flags of vLLM's API server that our frontend has no use for, and what to know instead.
_NOT_SERVED = {
    "api-server-count": "--frontends N starts several of them",
    "asc": "--frontends N starts several of them",
    "disable-access-log-for-endpoints": "--disable-uvicorn-access-log drops all of these lines",
    "grpc": "it speaks HTTP",
    "grpc-port": "it speaks HTTP",
    "h11-max-header-count": "h11 does not parse its requests",
    "h11-max-incomplete-event-size": "h11 does not parse its requests",
    "headless": "decode workers have no API server anyway",
    "uds": "it listens at --host and --port",
}
_ROLE_ARGS = ("decode-args", "prefill-args")
_SPECULATION = ("speculative-config", "sc", "spec-method", "spec-model", "spec-tokens")


def group_flags(arguments: Sequence[str]) -> list[list[str]]:
    """Return each flag with its values: ["--a", "1", "--b"] -> [["--a", "1"], ["--b"]].

    Raises ValueError for a value that no flag precedes."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            groups.append([argument])
        elif groups and "=" not in groups[-1][0]:
            groups[-1].append(argument)
        else:
            raise ValueError(argument)
    return groups


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flag_name(flag: str) -> str:
    """Return the plain name of a flag: `--no-a_b=1` -> `a-b`."""
    return flag.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")


def for_worker(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those that only an API server understands."""
    kept = (g for g in group_flags(arguments) if flag_name(g[0]) not in FRONTEND_ONLY)
    return [part for group in kept for part in group]


def for_frontend(arguments: Sequence[str]) -> list[str]:
    """Return those flags of decode workers that a frontend must know: how they speculate."""
    # Without them vLLM's frontend has no metrics of drafts and checks no request against them.
    kept = (
        # Also --speculative-config.method and the like.
        g
        for g in group_flags(arguments)
        if flag_name(g[0]).partition(".")[0] in _SPECULATION
    )
    return [part for group in kept for part in group]


def check(arguments: Sequence[str]) -> None:
    """Refuse stray words, flags that vLLM does not have, that pullfill sets itself, and flags that
    workers or frontends do not support. Raises ConfigError."""
    try:
        groups = group_flags(arguments)
    except ValueError as exc:
        raise ConfigError(
            f"unexpected argument {exc.args[0]!r}: vLLM flags are given as --flag value"
        ) from None
    for flag, *values in groups:
        given, _, joined = flag.partition("=")
        _check_name(given)
        name = flag_name(given)
        if name == "kv-transfer-config":
            raise ConfigError(
                f"{given} is pullfill's own to set: remove it. To keep more KV in CPU memory use "
                "--kv-offloading-size"
            )
        if name in _NOT_SERVED and not given.startswith("--no-"):
            raise ConfigError(f"{given}: not supported by pullfill's frontend: {_NOT_SERVED[name]}")
        alone = name in _SIZE and [joined or "", *values][-1] == "1"
        if _DATA_PARALLEL.match(name) and not alone:
            raise ConfigError(f"{given}: {NO_DATA_PARALLEL}")


def of_pullfill() -> set[str]:
    """Return the flags of pullfill's commands that also take vLLM's."""
    kinds = (UpOptions, WorkerOptions, FrontendOptions, ClusterOptions)
    return {one.name.partition("/")[0] for kind in kinds for one in declared(kind)} | _OF_UP


def _check_name(flag: str) -> None:
    """Refuse what is no whole name of a flag of vLLM. Raises ConfigError."""
    # vLLM also takes the beginning of a name. Here all who look for a flag would have to know.
    name = flag_name(flag).partition(".")[0]  # of --config.key
    if name in (LONG if flag.startswith("--") else SHORT) or flag.startswith("-O"):
        return
    ours = of_pullfill()
    if flag in ours:
        raise ConfigError(
            f"this command has no flag {flag}: see --help. Others of pullfill have it"
        )
    known = sorted(ours | {f"--{long}" for long in LONG})
    near = [long for long in known if long.startswith(f"--{name}")][:_FEW]
    near = near or get_close_matches(flag.replace("_", "-"), known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists those of pullfill"
    raise ConfigError(f"neither pullfill nor vLLM has a flag {flag}: {hint}")


def check_plain_http(arguments: Sequence[str]) -> None:
    """Refuse TLS flags for `up`. Raises ConfigError."""
    # `up` knows no certificate to trust, so it could not ask whether a frontend is ready.
    for flag in (argument.split("=", 1)[0].replace("_", "-") for argument in arguments):
        if flag.startswith("--ssl-"):
            raise ConfigError(
                f"{flag}: the frontends of `up` speak plain HTTP. Start the rest with `pullfill up "
                f"--frontends 0`, then `pullfill frontend {flag} ...` by hand"
            )


def of_role(option: str, text: str | None) -> list[str]:
    """Return the vLLM flags in the value of `--decode-args` or the like.

    Options of pullfill are refused. So are, among the flags of one role, those of vLLM's API
    server, which workers do not have. Raises ConfigError, one line."""
    try:
        arguments = shlex.split(text or "")
    except ValueError as exc:
        raise ConfigError(f"{option} {text!r} cannot be read ({exc}): check its quotes") from None
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name in of_pullfill():
            raise ConfigError(
                f"{name} in {option} is an option of pullfill: {option} takes vLLM flags only"
            )
    try:
        check(arguments)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    if option.endswith(_ROLE_ARGS):
        for flag in (group[0] for group in group_flags(arguments)):
            if flag_name(flag) in FRONTEND_ONLY:
                raise ConfigError(
                    f"{flag.partition('=')[0]} in {option} is a flag of frontends: give it to "
                    "`pullfill up` itself"
                )
    return arguments


# --------------------------------------------------------------------------- vLLM's names

# To read them from vLLM would take seconds: it must be imported. A test compares them with the
# installed release (tests/integration/test_vllm_names.py). All supported releases are here.

# What older supported releases know, and the newest does not.
GONE = frozenset({"enable-mamba-fine-grained-prefix-cache"})

# Without `--`, and without `--no-`, which turns off what can be turned off.
_ENGINE = frozenset(
    """
    additional-config aggregate-engine-logging all2all-backend allow-deprecated-quantization
    allowed-local-media-path allowed-media-domains api-server-count async-scheduling
    attention-backend attention-config aux-output-config block-size code-revision
    collect-detailed-traces compilation-config config config-format convert
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params
    cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address
    data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
    data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port
    data-parallel-size data-parallel-size-local data-parallel-start-rank
    data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
    dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size
    default-mm-loras device-ids device-memory-utilization diffusion-config disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-hybrid-kv-cache-manager
    disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window
    distributed-executor-backend distributed-timeout-seconds download-dir
    dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-sync-interval dtype ec-manager-config ec-transfer-config
    elastic-ep-max-dp-size enable-batch-sharded-sampling enable-chunked-prefill
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb
    enable-expert-parallel enable-fault-tolerance enable-flashinfer-autotune enable-hc-sp
    enable-layerwise-nvtx-tracing enable-logging-iteration-details enable-lora
    enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
    enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend
    enable-prefix-caching enable-prompt-embeds enable-return-routed-experts enable-shm-tensor-arena
    enable-sleep-mode enable-tower-connector-lora enable-trace-replay enforce-eager engram-config
    eplb-config expert-placement-strategy fail-on-environ-validation fault-tolerance-config
    fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization grpc grpc-port
    headless help hf-config-path hf-overrides hf-token host ignore-patterns interleave-mm-strings
    io-processor-plugin ir-op-priority jit-monitor-mode jit-monitor-verbose kda-decode-backend
    kda-prefill-backend kernel-config kv-cache-dtype kv-cache-dtype-skip-layers
    kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample kv-events-config
    kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
    language-model-only limit-mm-per-prompt linear-backend load-format log-config-file log-level
    logging-config logits-processors logprobs-mode long-prefill-token-threshold
    long-prefill-token-threshold-adaptive lora-dtype lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
    mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port max-cpu-loras
    max-cudagraph-capture-size max-logprobs max-lora-cls-labels max-lora-rank max-loras
    max-model-len max-num-active-seqs max-num-batched-tokens max-num-queued-reqs
    max-num-queued-tokens max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers
    media-io-kwargs mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
    mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model model-class-overrides model-impl
    model-loader-extra-config moe-backend nnodes node-rank num-gpu-blocks-override numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group
    offload-params offload-prefetch-step optimization-level otlp-traces-endpoint
    override-generation-config per-request-spec-decode-metrics performance-mode
    pipeline-parallel-size pooler-config port prefill-context-parallel-size
    prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo
    prefix-match-unit profiler-config pt-load-map-location quantization quantization-config
    ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin
    renderer-num-workers replayssm-buffer-len return-sampling-mask revision runner
    safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
    scheduler-cls scheduler-reserve-full-isl scheduling-policy seed served-model-name
    show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph sleep-preserve-parameter-names sparse-indexer-topk-backend
    spec-method spec-model spec-tokens specialize-active-lora speculative-config stream-interval
    structured-outputs-config swa-bounded-replay tensor-parallel-size tokenizer tokenizer-mode
    tokenizer-revision trust-remote-code ubatch-size uds use-fp64-gumbel use-replayssm
    use-tqdm-on-load video-pruning-method video-pruning-rate watermark watermark-config
    weight-transfer-config worker-cls worker-extension-cls
    """.split()
)
LONG = GONE | FRONTEND_ONLY | _ENGINE

# Without `-`. Also -O, which is followed by a number or a key at once.
SHORT = frozenset(
    "ac asc cc dc dcp dp dpa dpb dpe dph dpl dpm dpn dpp dpr ep h n pcp pp q r sc tp".split()
)
