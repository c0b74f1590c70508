"""Several instances behind one router: who is there, who gets what, and what becomes of a request when one is lost."""
