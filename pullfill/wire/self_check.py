"""What the self-check of two workers has found. Kept in etcd (docs/wire.md)."""

from __future__ import annotations

from pullfill.wire.codec import WIRE_VERSION, Finite, Id, Message, Version


class SelfCheck(Message, frozen=True, kw_only=True):
    """`self_checks/{pair}`: whether remote prefills of two kinds of workers equal local ones.

    kv_difference: largest relative difference of the KV of one block in one layer. None: this
    KV cache type cannot be read as numbers.
    logprob_difference: largest difference of a log probability of the next token. None: vLLM would
    compile something first, so it was not asked.
    kv_tolerance, logprob_tolerance: what rounding explains.
    """

    v: Version = WIRE_VERSION
    passed: bool
    kv_difference: Finite | None
    kv_tolerance: Finite
    logprob_difference: Finite | None
    logprob_tolerance: Finite
    decode_instance: Id
    prefill_instance: Id

    @property
    def word(self) -> str:
        return "passed" if self.passed else "failed"

    def advice(self, prefill_instance: str = "", decode_instance: str = "") -> str:
        """What a failure means and what to do. The instances: those that meet now, where they are
        not those that were compared."""
        prefill = prefill_instance or self.prefill_instance
        decode = decode_instance or self.decode_instance
        return (
            f"self_check_failed: a remote prefill by {prefill} is not what {decode} computes "
            f"itself: {self.in_words()}. It brings no KV. Compare versions and flags of the two "
            "workers, then run `pullfill recheck`"
        )

    def in_words(self) -> str:
        """The differences and their tolerances."""
        told = [
            f"{what} differ{s} by {value:.3g} (rounding explains {most:g})"
            for what, s, value, most in (
                ("KV", "s", self.kv_difference, self.kv_tolerance),
                ("log probabilities", "", self.logprob_difference, self.logprob_tolerance),
            )
            if value is not None
        ]
        return ", ".join(told) or "nothing could be compared"
