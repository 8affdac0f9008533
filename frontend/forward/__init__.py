"""Serves requests by stock vLLM servers, beside pullfill's own decode workers or without them.

layer        what a forwarder gets and promises; picks the forwarder of each request
stock        `staged` and `batch`: prefill at one stock server, decode at another
protocols    what each KV connector needs: bodies of both stages, order of dispatch
picker       which server gets a stage
exchange     one HTTP request to a stock server, passed on to the client
servers      the known stock servers and their health
sources      what names them: `--servers`, a watched file, heartbeats
forwarding   puts it all together for the process
"""
