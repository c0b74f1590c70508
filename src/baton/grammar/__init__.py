"""Structured output: from a grammar's text to the allowed next tokens.

    protocol/grammar.py    a request's grammar, as text
    language.py            converts every kind to llguidance's Lark
    vocabulary.py          the model's tokens, in llguidance's form
    matcher.py             a grammar and the tokens so far -> a bit per token: is it allowed next?
    check_process.py       the front's check of validity and cost, in a process that can be killed
    check_child.py         that process

llguidance does the work; docs/internals/notes/grammar.md has the measurements behind this choice.
"""
