"""LoRA adapters: prompts go remote with the right one, and are never computed with another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.lora import lora_adapter
from tests.support.prompts import Answer, ask, forget_decode_prefixes, random_prompt

pytestmark = pytest.mark.engine

FLAGS = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")
NAMES = ("red", "blue")
LENGTHS = (40, 300, 700)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapters(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one adapter for each name, and one whose rank is too high."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        lora_adapter(directory / name, model_path, seed)
    lora_adapter(directory / "large", model_path, 7, rank=16)
    return directory


@pytest.fixture(scope="module")
def cluster(
    adapters: Path, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("lora"), model_path) as cluster:
        cluster.start_servers()
        for role in ("decode", "prefill"):
            cluster.launch(role, *FLAGS)
        modules = [f"{name}={adapters / name}" for name in NAMES]
        cluster.launch(
            "frontend", *FLAGS, "--lora-modules", *modules,
            env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        )  # fmt: skip
        cluster.wait_ready(*cluster.workers)
        yield cluster


def same(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and one.logprobs == pytest.approx(
        other.logprobs, abs=TOLERANCE
    )


@pytest.mark.essential
def test_a_remote_prefill_computes_with_the_adapter_of_the_request(cluster: Cluster) -> None:
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    prompts.append(prompts[-1] + random_prompt(90, seed=2))  # a hit of each side's own adapter
    for prompt in prompts:
        cluster.set_router(policy="always_remote")
        remote = {model: ask(cluster, prompt, model=model) for model in ("tiny", *NAMES)}
        assert not any(same(a, b) for a, b in combinations(remote.values(), 2))
        told = [cluster.explain(answer.request_id) for answer in remote.values()]
        assert {t["path"] for t in told} == {"remote"}, len(prompt)
        cluster.set_router(policy="always_local")
        forget_decode_prefixes(cluster)
        for model, answer in remote.items():
            assert same(answer, ask(cluster, prompt, model=model)), (model, len(prompt))
    cluster.assert_clean()


@pytest.mark.essential
def test_other_files_at_its_path_are_another_adapter_once_they_are_loaded(
    cluster: Cluster, adapters: Path
) -> None:
    """All prompts have a prefix that is cached for the adapter before."""
    cluster.set_router(policy="always_remote")
    path = shutil.copytree(adapters / "red", adapters / "mine")
    prompt = random_prompt(300, seed=3)

    def answer(model: str) -> tuple[Answer, str]:
        found = ask(cluster, prompt, model=model)
        return found, cluster.explain(found.request_id)["path"]

    def changed_to(name: str) -> None:
        shutil.copy(adapters / name / "adapter_model.safetensors", path)

    load(cluster, "mine", path)
    changed_to("blue")  # nobody has said that it is to be loaded
    # First, for the engine keeps two adapters.
    (kept, where), (red, blue) = answer("mine"), [answer(name)[0] for name in NAMES]
    assert same(kept, red)
    assert not same(red, blue)
    assert where == "local", "the prefill worker has other files"
    assert "has other files" in cluster.of("prefill")[0].log.read_text()
    load(cluster, "mine", verb="unload")
    load(cluster, "mine", path)
    for _ in range(2):
        assert same(answer("mine")[0], blue)
    changed_to("red")
    load(cluster, "mine", path, load_inplace=True)
    assert same(answer("mine")[0], red)
    forget_decode_prefixes(cluster)
    again, where = answer("mine")
    assert same(again, red)
    assert where == "remote"
    cluster.assert_clean()


def load(
    cluster: Cluster, name: str, path: Path = Path(), verb: str = "load", **more: bool
) -> None:
    cluster.client().post(
        f"{cluster.frontend_url}/v1/{verb}_lora_adapter",
        body={"lora_name": name, "lora_path": str(path), **more},
        cast_to=object,
    )


@pytest.mark.essential
def test_an_adapter_that_cannot_be_loaded_is_refused_and_ends_no_engine(
    cluster: Cluster, adapters: Path
) -> None:
    with pytest.raises(openai.APIStatusError, match=r"16.*max_lora_rank"):
        load(cluster, "large", adapters / "large")
    with pytest.raises(openai.NotFoundError):
        ask(cluster, random_prompt(40, seed=4), model="large")
    assert same(*(ask(cluster, random_prompt(40, seed=5), model="red") for _ in range(2)))
