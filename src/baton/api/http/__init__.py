"""HTTP without the content of requests: connections, bodies, streams, keys, the request log, shutdown."""
