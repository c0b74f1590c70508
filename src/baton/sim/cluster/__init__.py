"""A cluster in virtual time: routers, nodes and the sessions between them, each of which may fail at any moment."""
