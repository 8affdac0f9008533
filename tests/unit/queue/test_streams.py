"""What is encoded in names: token counts in subjects, deliveries in ack subjects. And urgencies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import BadMessage
from pullfill.queue.contract import Urgency, urgency_of
from pullfill.queue.streams import Names, parse_ack, round_up_tokens, subject_tokens


@given(st.integers(0, 2**32 - 1))
def test_rounding_never_understates_and_overstates_by_a_sixteenth_at_most(tokens: int) -> None:
    rounded = round_up_tokens(tokens)
    assert tokens <= rounded <= tokens + tokens / 16
    assert round_up_tokens(rounded) == rounded


@given(st.integers(0, 2**32 - 1))
def test_a_job_subject_tells_its_tokens(tokens: int) -> None:
    assert subject_tokens(Names("ns", "abc").job(tokens)) == round_up_tokens(tokens)


@pytest.mark.parametrize("subject", ["", "a.b", "a.many", "a.-1", "a.1e9", "a.²", "a." + "9" * 40])
def test_a_foreign_subject_counts_nothing(subject: str) -> None:
    assert subject_tokens(subject) == 0


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.ACK.S.prefill-loose.3.17.9.1700000000000000001.4",
        "$JS.ACK._.hash.S.prefill-loose.3.17.9.1700000000000000001.4",
    ],
)
def test_both_forms_of_ack_subject(subject: str) -> None:
    ack = parse_ack(subject)
    assert (ack.stream, ack.urgency, ack.number, ack.seq) == ("S", Urgency.LOOSE, 3, 17)


@settings(max_examples=50)
@given(st.text(max_size=80))
def test_any_other_text_is_refused(text: str) -> None:
    for subject in (text, f"$JS.ACK.{text}"):
        with pytest.raises(BadMessage):
            parse_ack(subject)


TIGHT, NORMAL, LOOSE = Urgency


@pytest.mark.parametrize(
    ("ttft_ms", "urgency"),
    [(None, NORMAL), (1, TIGHT), (500, TIGHT), (501, NORMAL), (4999, NORMAL), (5000, LOOSE)],
)
def test_the_target_says_how_urgent_a_request_is(ttft_ms: float | None, urgency: Urgency) -> None:
    assert urgency_of(ttft_ms, 500.0, 5000.0) is urgency
