"""ANSWERS: HTTP dialects in front of an engine that knows token ids only.

A request's life, and the file of each stage:

http/server.py          bytes -> HTTP, with deadlines for slow senders        (uvicorn, a little stricter)
http/request_log.py     the request's id, and its line in the log at the end
app.py                  which route
http/access.py          may this caller, and this web page, call it (auth.py: whose key is it)
http/json_body.py       body -> a JSON value, or 400/413/415 before anything large is made
openai/schemas.py       the value -> ChatBody or CompletionBody; every number is in limits.py
generate/prepare.py     body -> GenerateRequest (prompts.py: text -> token ids that fit the context)
generate/generation.py  GenerateRequest -> deltas of the engine -> pieces for the client (output.py: text, stops, logprobs)
openai/shape.py         pieces -> OpenAI's shapes
http/streaming.py       server-sent events, never waiting for a slow client

Other dialects (responses/, anthropic/, ollama/, embeddings/) have a table of their fields, which translates a body to OpenAI's
(translate.py), and shapes of their own.

routes/ answers everything that generates nothing. `generate/engine_client.py` is the interface to the engine.
"""
