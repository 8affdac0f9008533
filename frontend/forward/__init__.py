"""Serves requests by stock vLLM servers, beside pullfill's own decode workers or without them.

contract     what a forwarder gets and promises
pull         hands a request to pullfill's decode workers (the default)
stock        `staged` and `batch`: prefill at one stock server, decode at another
protocol     what a KV connector needs: bodies of both stages, order of dispatch
servers      the known stock servers and their health
entries      how servers are named
server_file  the watched file of `--servers-file`
choice       which server gets a request
bodies       request bodies: the one-token prefill, and what the policies need of a prompt
exchange     one HTTP request to a stock server
heartbeats   servers that register themselves, over HTTP or ZMQ (heartbeat_socket)
relay        passes answers and errors on to the client
run          one request on its way through the stages
layer        the ASGI layer that picks the forwarder of each request
setup        puts it all together for the process
"""
