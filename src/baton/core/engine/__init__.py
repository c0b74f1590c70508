"""One serving instance: requests in, step plans out, tokens back."""
