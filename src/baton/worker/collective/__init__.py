"""Exchanges among the ranks of a worker set: base.py has the interface, opening.py chooses between shared memory
(native/exchange.py) and torch.distributed (distributed.py)."""
