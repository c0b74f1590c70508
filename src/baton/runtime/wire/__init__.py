"""Sockets between processes: channels of one server, sessions between router and instance, descriptors."""
