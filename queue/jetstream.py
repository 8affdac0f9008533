"""The job queue on NATS JetStream: `JetStreamProducer` (decode), `JetStreamConsumer` (prefill).

producer.py         publish, cancel, depth, circuit breaker
consumer.py         pull, drain, settling
pull_requests.py    the pull requests of a worker
lanes.py            in which lanes jobs wait, notices
urgency.py          which waiting job comes next
delivery.py         one delivery
acks.py             acks, sent until they are confirmed
unsettled.py        settles jobs whose publish got no answer
nats_connection.py  one connection, redialled after each loss
pulse.py            notices a server that does not answer
streams.py          makes and checks the streams and the consumers
names.py            names of streams and subjects, token counts in subjects, ack subjects
depth.py            depth from a cache, shared between decode workers
deadletter.py       jobs that nobody may try again
"""

from __future__ import annotations

from pullfill.queue.consumer import JetStreamConsumer
from pullfill.queue.producer import JetStreamProducer

__all__ = ["JetStreamConsumer", "JetStreamProducer"]
