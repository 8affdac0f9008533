"""vLLM flags: which are refused, which are one role's, and which GPUs and cores they ask for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pullfill.config import ClusterRef
from pullfill.deploy import accelerator, cli, plan, vllm_flags
from pullfill.errors import ConfigError
from tests.support import docs

REF = ClusterRef("blue", "http://127.0.0.1:2", "nats://127.0.0.1:1", Path("/state"))
runner = CliRunner()


class TestRefused:
    def test_a_flag_of_another_command(self) -> None:
        result = runner.invoke(cli.app, ["up", "--cpu", "3"])
        assert "this command has no flag --cpu: see --help" in str(result.exception)

    def test_all_flags_of_pullfill_are_known(self) -> None:
        taking = [cli.app.commands[name] for name in cli.FOR_VLLM]
        flags = set[str]().union(*(docs.flags(command) for command in taking))
        long = {flag for flag in flags if flag.startswith("--") and not flag.startswith("--no-")}
        assert long | {"--instance-id"} == vllm_flags.of_pullfill()

    def test_all_ways_to_write_a_flag_of_vllm(self) -> None:
        for flag in ("--max_model_len=1", "--no-enable-prefix-caching", "-sc.method=ngram"):
            vllm_flags.check([flag])
        for flag in ("--speculative-config.method=ngram", "-O3", "-O.level=3"):
            vllm_flags.check([flag])

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            (["--max-modl-len", "1"], "has a flag --max-modl-len: .*--max-model-len"),
            (["--kv-mod3", "1"], "has a flag --kv-mod3: .*--kv-mode"),
            (["-tq", "1"], "has a flag -tq: .*--help"),
            (["--zzz", "1"], "has a flag --zzz: .*--help"),
            (["--decod", "1"], "has a flag --decod: .*--decode or --decode-args"),
            (["--no-enable-pref", "1"], "flag --no-enable-pref: .*--enable-prefix-caching"),
            (["--max-num-s=1"], "--max-num-s: .*--max-num-scheduled-tokens or --max-num-seqs"),
            (["x"], "given as --flag value"),
            (["--a=1", "x"], "given as --flag value"),
            (["--uds", "/run/s"], "frontend: it listens at --host and --port"),
            (["-asc", "2"], "frontend: --frontends N"),
            (["-dp", "2"], "--decode N"),
            (["--dp-supervisor-probe-timeout-s", "1"], "--decode N"),
        ],
    )
    def test_what_nobody_has_and_what_pullfill_does_not_do(
        self, given: list[str], why: str
    ) -> None:
        with pytest.raises(ConfigError, match=why):
            vllm_flags.check(given)

    @pytest.mark.parametrize("command", ["up", "decode", "prefill", "frontend"])
    def test_each_command_checks_them(self, command: str, state_dir: Path) -> None:
        where = [] if command == "up" else ["--etcd", "http://h:1", "--nats", "nats://h:1"]
        result = runner.invoke(cli.app, [command, *where, "-dp", "2"])
        assert str(result.exception).startswith("-dp: ")
        assert not state_dir.exists() or not list(state_dir.glob("*.json"))


class TestOneRole:
    def test_frontends_learn_how_decode_workers_speculate(
        self, ups: list[plan.UpOptions], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
        given = ["--speculative-config", '{"a": 1}', "-sc.method=ngram", "--spec-tokens=3"]
        value = shlex.join(["-tp", "2", *given])
        assert runner.invoke(cli.app, ["up", "--decode-args", value]).exit_code == 0
        argvs = {s.role: s.argv for s in plan.worker_specs(ups[0], REF)}
        assert argvs["decode"][-4:] == argvs["frontend"][-4:] == given
        assert not set(given) & set(argvs["prefill"])
        assert "-tp" not in argvs["frontend"]

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            ("-tp '2", "cannot be read"),
            ("--port 9", "--port in --decode-args is an option of pullfill"),
            ("--help", "--help in"),
            ("-dp 2", "-dp: workers do not run data-parallel engines"),
            ("--kv-transfer-config {}", "own to set"),
            ("--kv-transfer-config.kv_role kv_both", "own to set"),
            ("--api-key k", "--api-key in --decode-args is a flag of frontends"),
            ("--seed 1 --ssl_keyfile=k", "--ssl_keyfile in --decode-args is a flag of frontends"),
        ],
    )
    def test_what_is_wrong_in_them(self, ups: list[plan.UpOptions], value: str, why: str) -> None:
        result = runner.invoke(cli.app, ["up", "--decode-args", value])
        assert isinstance(result.exception, ConfigError)
        assert why in str(result.exception)
        assert "--decode-args" in str(result.exception)
        assert "\n" not in str(result.exception)
        assert ups == []
