"""Serves requests by stock vLLM servers, beside pullfill's own decode workers or without them.

layer        puts it all together; picks who gets each request: decode workers or stock servers
stock        `staged` and `parallel`: prefill at one stock server, decode at another
protocols    what each KV connector needs: bodies of both stages, whether both can start at once
servers      the known stock servers, their health, and which of them gets a stage
sources      what names them: `--servers`, heartbeats
"""
