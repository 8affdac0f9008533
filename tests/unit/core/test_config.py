"""How a process finds its cluster: URLs, or the file in the state directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.config import (
    CLUSTER_FILE,
    ClusterRef,
    ranks_of,
    read_cluster_file,
)
from pullfill.errors import ConfigError
from tests.support.state_dir import recorded


class TestClusterRef:
    def test_urls_win_over_the_file(self, tmp_path: Path) -> None:
        recorded(tmp_path)
        ref = ClusterRef.resolve(state_dir=tmp_path, etcd="http://h:9", namespace="green")
        assert (ref.namespace, ref.etcd_url, ref.nats_url) == (
            "green", "http://h:9", "nats://h:1",
        )  # fmt: skip

    @pytest.mark.parametrize(("given", "missing"), [("etcd", "--nats"), ("nats", "--etcd")])
    @pytest.mark.parametrize("named", [False, True], ids=["default", "by the environment"])
    def test_a_url_of_another_cluster_is_not_mixed_with_the_file(
        self, state_dir: Path, given: str, missing: str, named: bool
    ) -> None:
        own = recorded(state_dir)
        directory = str(state_dir) if named else None
        with pytest.raises(ConfigError, match=rf"--{given} x is not .* give {missing} URL, too"):
            ClusterRef.resolve(state_dir=directory, **{given: "x"})
        same = {given: getattr(own, f"{given}_url")}
        ref = ClusterRef.resolve(state_dir=directory, **same)
        assert (ref.namespace, ref.etcd_url, ref.nats_url) == ("n", own.etcd_url, own.nats_url)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"namespace": 1}', b"\xff"])
    def test_a_damaged_file_says_what_to_do(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / CLUSTER_FILE).write_bytes(content)
        with pytest.raises(ConfigError, match=r"damaged.* delete the file"):
            read_cluster_file(tmp_path)


def test_ranks_are_counted_from_the_flags() -> None:
    for flags, count in (
        ([], 1),
        (["-tp", "2", "--enforce-eager", "-pp=3"], 6),
        (["--tensor_parallel_size=4", "--max-model-len", "8"], 4),
        (["--tensor-parallel-size"], 1),
        (["--max-num-seqs", "-tp", "0"], 1),
        (["-tp", "2", "-pp", "2", "--tensor-parallel-size=4"], 8),
    ):
        assert ranks_of(flags) == count, flags
