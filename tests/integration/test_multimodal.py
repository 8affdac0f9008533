"""Prompts with images go remote where a prefill worker can take the images. The answer is one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from tests.support.cluster import Cluster
from tests.support.prompts import forget_decode_prefixes
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
TEXT = "what is it? " * 20
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


def create(cluster: Cluster, colour: str, text: str = TEXT, **more: Any) -> Any:
    """Ask about an image. The text comes after it."""
    content: Any = [
        {"type": "image_url", "image_url": {"url": picture(colour)}},
        {"type": "text", "text": text},
    ]
    return cluster.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        extra_body={"ignore_eos": True},
        **more,
    )


def ask(cluster: Cluster, colour: str, text: str = TEXT) -> Seen:
    told = create(cluster, colour, text, max_tokens=6, logprobs=True)
    parts = told.choices[0].logprobs.content
    return Seen(told.id, tuple(p.token for p in parts), tuple(p.logprob for p in parts))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template = "--chat-template={% for m in messages %}{{ m.content }}{% endfor %}"
    model = ZOO["BLIP-2, text"].checkpoint()
    with Cluster(tmp_path_factory.mktemp("images"), model) as cluster:
        yield cluster.start("decode", "decode", "prefill", ("frontend", template))


@pytest.mark.essential
def test_images_go_remote_and_change_the_answer(cluster: Cluster) -> None:
    cluster.set_router(policy="always_local")
    local = {colour: ask(cluster, colour) for colour in COLOURS}
    answers = list(local.values())
    assert not any(a.same(b) for i, a in enumerate(answers) for b in answers[:i])
    cluster.set_router(policy="always_remote")
    forget_decode_prefixes(cluster)
    for colour, expected in local.items():
        answer = ask(cluster, colour)
        assert answer.same(expected), colour
        assert cluster.explain(answer.request_id)["path"] == "remote", colour
    # A hit that ends after the image, and one that ends in it.
    for text in (TEXT + "And what else? " * 9, "Or nothing? " * 30):
        remote = {colour: ask(cluster, colour, text=text) for colour in COLOURS}
        told = [cluster.explain(answer.request_id) for answer in remote.values()]
        assert {t["path"] for t in told} == {"remote"}
        cluster.set_router(policy="always_local")
        forget_decode_prefixes(cluster)
        for colour, answer in remote.items():
            assert ask(cluster, colour, text=text).same(answer), colour
        cluster.set_router(policy="always_remote")
    cluster.assert_clean()


@pytest.mark.long
def test_an_image_is_known_to_every_decode_worker(cluster: Cluster) -> None:
    """The frontend has sent it to one of them only."""
    cluster.set_router(policy="always_local")
    answers = [ask(cluster, "purple") for _ in range(4)]
    assert len({cluster.explain(a.request_id)["decode_instance"] for a in answers}) == 2
    assert all(answers[0].same(answer) for answer in answers)


@pytest.mark.long
def test_an_image_that_no_prefill_worker_takes_stays_local(cluster: Cluster) -> None:
    cluster.set_router(policy="always_remote")
    (old,) = cluster.of("prefill")
    cluster.add("prefill", '--limit-mm-per-prompt={"image": 0}')
    assert old.stop() == 0
    told = cluster.explain(ask(cluster, "orange").request_id)
    assert told["path"] == "local", told
    assert "1 inputs of type image" in cluster.of("prefill")[0].log.read_text()
    cluster.assert_clean()
