"""The router process: instances, their sessions, requests that it sends to them."""
