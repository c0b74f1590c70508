"""A cluster in virtual time: routers, instances and the sessions between them, each of which may fail at any moment."""
