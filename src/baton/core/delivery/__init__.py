"""Delivery: what each client has been given, and how a request is continued after its engine is lost."""
