"""OpenAI HTTP in, token stream out: discovers decode workers and routes requests to them.

    main        process: socket, registry, HTTP server, drain
    decode_pool        which decode workers exist, and which of them may take requests
    decode_connection  one ZMQ connection to one decode worker
    dispatch    which request is at which worker; re-sends, failures, utility calls
    waiting     requests that are at no worker, and when each is placed or given up
    suspects    which request killed a worker, and what is refused for it
    board       what frontends tell each other about suspects
    probation   when and where a suspect is sent again
    flight      one request, and what is known of those like it
    balancer    chooses the decode worker for a request
    explain     why and how recent requests were served
    admission   HTTP admission: 429 when full, 503 while no decode worker can take requests
    http_auth   who may call which HTTP route
    routes      /live /ready /pullfill/* /metrics
    cluster     what workers report, fetched and merged

The parts that touch vLLM are `pullfill.engine.front_app` and `pullfill.engine.front_client`.
"""
