"""What the intake makes of a prompt: the request that vLLM would have made."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pullfill.engine import front_wire
from pullfill.engine.requests import UNTRACKED, own_request, prepare
from tests.support.prompts import random_prompt


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
