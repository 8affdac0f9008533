"""OpenAI HTTP in, token stream out: discovers decode workers and routes requests to them.

    main               the process: socket, registry, HTTP server, drain
    decode_pool        which decode workers exist, and which of them may take requests
    decode_connection  one ZMQ connection to one decode worker
    dispatch           which request is at which worker; sends it again, or fails it
    calls              engine utilities (reset_prefix_cache, ...), called on all workers
    waiting            requests that are at no worker, and when each is placed or given up
    suspects           which request killed workers; refuses that request
    flight             one request
    balancer           chooses the decode worker for a request
    explain            why and how recent requests were served
    admission          HTTP admission: 429 when full, 503 while no decode worker can take requests
    request_bodies     refuses bodies that vLLM's checks would take seconds for
    http_auth          who may call which HTTP route
    routes             /live /ready /pullfill/* /metrics
    cluster            what workers report, fetched and merged
    metrics            the frontend's own metrics

The parts that touch vLLM are `pullfill.engine.front_app` and `pullfill.engine.front_client`.
"""
