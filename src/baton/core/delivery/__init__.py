"""Delivery: the tokens that each client has received, and how a request continues after its engine is lost."""
