"""OpenAI HTTP in, token stream out: discovers decode workers and routes requests to them.

    main, routes, http_auth, admission    the process, its HTTP routes, who may call them, and when
    dispatch, flight, suspects            which request is at which worker, and what if one is lost
    decode_pool, decode_connection        which workers may take requests; a ZMQ connection to each
    routing/                              which worker gets a request
    request_log                           one record per request, for explain, spans and the page
    cluster_view, counters                what workers report; the frontend's own metrics
    live/                                 the live page, also without a frontend
    forward/                              stock vLLM servers in the place of pullfill's workers

The parts that touch vLLM are `pullfill.engine.front_app` and `pullfill.engine.front_client`.
"""
