"""From a checked request to the engine and back: token ids, text, stop strings, pieces. Knows no dialect."""
