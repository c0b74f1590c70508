"""HTTP and nothing of what is asked: connections, bodies, streams, keys, log lines, the end of the server."""
