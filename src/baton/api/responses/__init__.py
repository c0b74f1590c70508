"""OpenAI's Responses API: /v1/responses, with the answers that it keeps."""
