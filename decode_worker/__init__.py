"""Owns the request and its blocks; decides local or remote; grants, commits, revokes.

side, context                   makes all parts; what they share
request_server, frontends       requests in, tokens out; load, and requests given back
scheduler                       what vLLM's scheduler calls: decide, enqueue, finish
rules, outlook, forecast, cost  the decision: rules, what they know, expected times, prices
handoff, ledger                 remote prefills: their messages, their states
control, peers, kv_reader       connected prefill workers, and reads of their KV (pull mode)
prefix/                         prefixes read from other decode workers
request_trace, meter, demand    records, measured steps, how many workers are needed
self_check, difference          compares a remote prefill with a local one
"""
