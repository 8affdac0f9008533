"""Prompts with images go remote where a prefill worker can take the images. The answer is one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from PIL import Image

from tests.support.cluster import Cluster
from tests.support.prompts import forget_decode_prefixes
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
COLOURS = ("red", "green", "blue")


def picture(colour: str, side: int = 70) -> str:
    """A data URL of an image of one colour, with a corner of another."""
    image = Image.new("RGB", (side, side), colour)
    image.paste("white", (0, 0, side // 3, side // 2))
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@dataclass(frozen=True)
class Seen:
    request_id: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    def same(self, other: Seen) -> bool:
        return self.tokens == other.tokens and self.logprobs == pytest.approx(
            other.logprobs, abs=TOLERANCE
        )


def ask(cluster: Cluster, *colours: str, text: str = "what is it? " * 20) -> Seen:
    """Ask about images. The text comes after them."""
    content = [
        *({"type": "image_url", "image_url": {"url": picture(c)}} for c in colours),
        {"type": "text", "text": text},
    ]
    told = cluster.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        max_tokens=6,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    shown = told.choices[0].logprobs
    assert shown is not None
    parts = shown.content or []
    return Seen(told.id, tuple(p.token for p in parts), tuple(p.logprob for p in parts))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("images"), ZOO["LLaVA, text"].checkpoint())
    try:
        cluster.start_servers()
        template = "--chat-template={% for m in messages %}{{ m.content }}{% endfor %}"
        for role in ("decode", "decode", "prefill"):
            cluster.launch(role)
        cluster.launch("frontend", template, env={"VLLM_SERVER_DEV_MODE": "1"})
        cluster.wait_ready(*cluster.workers)
        yield cluster
    finally:
        cluster.stop()


def test_images_go_remote_and_change_the_answer(cluster: Cluster) -> None:
    asked = [(c,) for c in COLOURS] + [("red", "blue"), ("blue", "red")]
    cluster.set_router(policy="always_local")
    local = {colours: ask(cluster, *colours) for colours in asked}
    answers = list(local.values())
    assert not any(a.same(b) for i, a in enumerate(answers) for b in answers[:i])
    cluster.set_router(policy="always_remote")
    forget_decode_prefixes(cluster)
    for colours, expected in local.items():
        answer = ask(cluster, *colours)
        assert answer.same(expected), colours
        assert cluster.explain(answer.request_id)["path"] == "remote", colours
    for colours in asked:  # a hit that ends after the image, or in it
        remote = ask(cluster, *colours, text="what is it? " * 20 + "And what else? " * 9)
        assert cluster.explain(remote.request_id)["path"] == "remote", colours
        cluster.set_router(policy="always_local")
        assert ask(cluster, *colours, text="what is it? " * 20 + "And what else? " * 9).same(remote)
        cluster.set_router(policy="always_remote")
    cluster.assert_clean()


def test_an_image_is_known_to_every_decode_worker(cluster: Cluster) -> None:
    """The frontend has sent it to one of them only."""
    cluster.set_router(policy="always_local")
    answers = [ask(cluster, "purple") for _ in range(4)]
    assert len({cluster.explain(a.request_id)["decode_instance"] for a in answers}) == 2
    assert all(answers[0].same(answer) for answer in answers)


def test_an_image_that_no_prefill_worker_takes_stays_local(cluster: Cluster) -> None:
    cluster.set_router(policy="always_remote")
    (old,) = cluster.of("prefill")
    cluster.wait_ready(cluster.launch("prefill", '--limit-mm-per-prompt={"image": 1}'))
    assert old.stop() == 0
    one, two = ask(cluster, "orange"), ask(cluster, "orange", "pink")
    assert cluster.explain(one.request_id)["path"] == "remote"
    told = cluster.explain(two.request_id)
    assert told["path"] == "local", told
    assert "2 inputs of type image" in cluster.of("prefill")[0].log.read_text()
    cluster.assert_clean()
