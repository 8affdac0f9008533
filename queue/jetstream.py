"""The job queue on NATS JetStream: `JetStreamProducer` (decode), `JetStreamConsumer` (prefill).

names.py       names of streams and subjects, token counts in subjects, ack subjects
nats_connection.py  one connection, redialled for ever
streams.py     what the streams and the consumer look like; making and checking them
producer.py    publish, cancel, depth, circuit breaker
consumer.py    pull, drain, settling
    delivery.py    one delivery
deadletter.py  jobs nobody may try again
depth.py       depth from a cache
"""

from __future__ import annotations

from pullfill.queue.consumer import JetStreamConsumer
from pullfill.queue.producer import JetStreamProducer

__all__ = ["JetStreamConsumer", "JetStreamProducer"]
