"""What an answer must look like: from a grammar's text to the tokens that may come next.

    protocol/grammar.py    a request's grammar, as text
    language.py            every kind of it as one text that llguidance reads
    vocabulary.py          the model's tokens, as llguidance wants them
    matcher.py             a grammar and the tokens so far -> a bit for each token: may it come next?
    check_process.py       the front's side: is it a grammar at all, and cheap enough? asked in a process that can be killed
    check_child.py         that process

llguidance does the work; docs/internals/notes/grammar.md has the measurements by which it was chosen.
"""
