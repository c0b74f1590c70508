"""`LLM`: the engine in the calling process, for scripts and notebooks.

    from baton.llm import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for answer in llm.chat([[{"role": "user", "content": "What is the capital of Japan?"}]]):
            print(answer.outputs[0].text)
        for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=64, stop="The end")):
            print(chunk.text, end="", flush=True)

Nothing is shared with a server: the model is loaded here, steps run when `generate` is called or a stream is read, and all
prompts of a call are batched continuously. Sampling defaults are the server's: the model's recommendation, else OpenAI's
(`LLM.sampling_defaults`). `SamplingParams(temperature=0)` is greedy. vLLM's keywords are accepted with the same meaning
(keywords.py, sampling.py).

engine.py     LLM: a call from its prompts to its answers
sampling.py   SamplingParams, and their conversion for the engine
call.py       the state of one call
outputs.py    the results; detokenising and stop strings
stream.py     the same answers, chunk by chunk
prompts.py    the accepted forms of a prompt
scores.py     scores of pairs of texts, classes of texts
keywords.py   settings under vLLM's names
"""

from __future__ import annotations

from baton.llm.engine import LLM
from baton.llm.outputs import Chunk, Classification, Embedding, Output, PairScore, SequenceAnswer
from baton.llm.sampling import GuidedDecodingParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from baton.llm.stream import AnswerStream

__all__ = [
    "LLM",
    "AnswerStream",
    "Chunk",
    "Classification",
    "Embedding",
    "GuidedDecodingParams",
    "Output",
    "PairScore",
    "RepetitionDetectionParams",
    "SamplingParams",
    "SequenceAnswer",
    "StructuredOutputsParams",
]
