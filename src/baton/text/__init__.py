"""Converts between text and token ids. Only the front imports this package: text never reaches an engine.

A chat request goes down this list, its answer comes back up:

chat_messages.py   the client's messages         -> plain, checked messages
chat_template.py   messages                      -> one prompt string (rendered in a child: template_process.py)
tokenizer.py       prompt                        -> token ids (built by hf_tokenizer.py or gguf_tokenizer.py)
detokenizer.py     token ids, a few at a time    -> text, never half a character
parsers/           text, a piece at a time       -> typed parts: content, reasoning, tool calls
stops.py           content, a piece at a time    -> the text that may be sent, and the stop string that ended it

helper.py          processes that can be killed, for templates, grammars and large JSON

loading.py reads all of it from a model on disk: a Hugging Face folder or a GGUF file.
"""
