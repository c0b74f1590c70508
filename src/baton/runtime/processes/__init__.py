"""Children: how one is started, watched, restarted and ended; the table of all of them."""
