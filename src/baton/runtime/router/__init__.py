"""The router process: sessions of instances, and requests sent to them."""
