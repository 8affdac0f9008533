"""Prompts with images go remote where a prefill worker can take the images. The answer is one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from itertools import combinations

import pytest
from PIL import Image

from tests.support.answers import Heard, ask_for
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


def ask(cluster: Cluster, colour: str, text: str = TEXT) -> Heard:
    """Ask about an image. The text comes after it."""
    content = [
        {"type": "image_url", "image_url": {"url": picture(colour)}},
        {"type": "text", "text": text},
    ]
    heard = ask_for(cluster, content, 6, logprobs=True)
    assert heard.done.wait(60)
    assert not heard.error
    return heard


def same(one: Heard, other: Heard) -> bool:
    near = pytest.approx(other.logprobs, abs=TOLERANCE)
    return one.tokens == other.tokens and one.logprobs == near


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template = "--chat-template={% for m in messages %}{{ m.content }}{% endfor %}"
    model = ZOO["BLIP-2, text"].checkpoint()
    with Cluster(tmp_path_factory.mktemp("images"), model) as cluster:
        yield cluster.start("decode", "decode", "prefill", ("frontend", template))


@pytest.mark.essential
def test_images_go_remote_and_change_the_answer(cluster: Cluster) -> None:
    cluster.set_router(policy="always_remote")
    # Cold, a hit that ends after the image, and one that ends in it.
    for text in (TEXT, TEXT + "And what else? " * 9, "Or nothing? " * 30):
        remote = {colour: ask(cluster, colour, text=text) for colour in COLOURS}
        assert not any(same(a, b) for a, b in combinations(remote.values(), 2))
        told = [cluster.explain(answer.request_id) for answer in remote.values()]
        assert {t["path"] for t in told} == {"remote"}
        cluster.set_router(policy="always_local")
        forget_decode_prefixes(cluster)
        for colour, answer in remote.items():
            assert same(ask(cluster, colour, text=text), answer), colour
        cluster.set_router(policy="always_remote")
    cluster.assert_clean()


@pytest.mark.long
def test_an_image_is_known_to_every_decode_worker(cluster: Cluster) -> None:
    """The frontend has sent it to one of them only."""
    cluster.set_router(policy="always_local")
    answers = [ask(cluster, "purple") for _ in range(4)]
    assert len({cluster.explain(a.request_id)["decode_instance"] for a in answers}) == 2
    assert all(same(answers[0], answer) for answer in answers)


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
