"""ANSWERS: OpenAI's HTTP dialect in front of an engine that knows token ids only.

A request's life, and the file of each stage:

server.py        bytes -> HTTP, with deadlines for slow senders        (uvicorn, a little stricter)
request_log.py   the request's id, and its line in the log at the end
app.py           which route
access.py        may this caller, and this web page, call it (auth.py: whose key is it)
json_body.py     body -> a JSON value, or 400/413/415 before anything large is made
schemas.py       the value -> ChatBody or CompletionBody; every number is in limits.py
prepare.py       text -> token ids, body -> GenerateRequest
generation.py    GenerateRequest -> deltas of the engine -> pieces for the client (output.py: text, stops, logprobs)
chat.py, completions.py    pieces -> OpenAI's shapes
streaming.py     server-sent events, never waiting for a slow client

models.py, tokens.py, admin.py, chat_page.py answer the other routes. `engine_client.py` is all that is known of the engine.
"""
