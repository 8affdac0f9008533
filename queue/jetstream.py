"""The job queue on NATS JetStream: `JetStreamProducer` (decode), `JetStreamConsumer` (prefill).

producer.py         publish, cancel, depth, circuit breaker
consumer.py         pull, drain, settling
delivery.py         one delivery
acks.py             acks, sent until they are confirmed
nats_connection.py  one connection, redialled after each loss
pulse.py            notices a server that does not answer
streams.py          makes and checks the streams and the consumer
names.py            names of streams and subjects, token counts in subjects, ack subjects
depth.py            depth from a cache, shared between decode workers
deadletter.py       jobs that nobody may try again
"""

from __future__ import annotations

from pullfill.queue.consumer import JetStreamConsumer
from pullfill.queue.producer import JetStreamProducer

__all__ = ["JetStreamConsumer", "JetStreamProducer"]
