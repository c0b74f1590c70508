"""`LLM`: the same machines in one process, for scripts and notebooks.

    from baton.llm import LLM, SamplingParams

    with LLM("smollm2") as llm:
        for answer in llm.chat([[{"role": "user", "content": "What is the capital of Japan?"}]]):
            print(answer.outputs[0].text)
        for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=64, stop="The end")):
            print(chunk.text, end="", flush=True)

Nothing is shared with a server: the model is loaded here, steps run when `generate` is called or a stream is read, and all
prompts of a call are batched continuously. Sampling that a call does not name is as the server's would be: the model's
recommendation, else OpenAI's defaults (`LLM.sampling_defaults`). `SamplingParams(temperature=0)` takes the likeliest token
always. Keywords have vLLM's names too, and mean the same (keywords.py, sampling.py).

engine.py     LLM: a call from its prompts to its answers
sampling.py   SamplingParams, and what the engine is told of them
call.py       what one call has got so far
outputs.py    what comes back, and how tokens become text that stop strings end
stream.py     the same answers, chunk by chunk
prompts.py    what may be a prompt
keywords.py   settings under vLLM's names
"""

from __future__ import annotations

from baton.llm.engine import LLM
from baton.llm.outputs import Chunk, Embedding, Output, SequenceAnswer
from baton.llm.sampling import GuidedDecodingParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from baton.llm.stream import AnswerStream

__all__ = [
    "LLM",
    "AnswerStream",
    "Chunk",
    "Embedding",
    "GuidedDecodingParams",
    "Output",
    "RepetitionDetectionParams",
    "SamplingParams",
    "SequenceAnswer",
    "StructuredOutputsParams",
]
