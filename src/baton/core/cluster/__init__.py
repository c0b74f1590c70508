"""The router of several instances: membership, placement, queue, and replay of requests after a loss."""
