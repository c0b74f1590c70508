// One answer from the server: server-sent events into a message, which grows in place.

// The page may be at /llm as well as at /llm/.
const at = (route) => location.pathname.replace(/\/?$/, "/") + route;

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function errorOf(reply) {
  const text = await reply.text();
  try { return JSON.parse(text).error.message; } catch { return reply.status + " " + (text.slice(0, 200) || reply.statusText); }
}

// `message` is told what came: content, reasoning, tool_calls, numbers, and error where there was one. `changed` is called
// after each event. Returns when the answer has ended, however it ended.
async function fetchAnswer(body, message, signal, changed) {
  const began = performance.now(), numbers = message.numbers = { tokens: 0 };
  let last = null;
  try {
    const reply = await fetch(at("v1/chat/completions"), {
      method: "POST", signal, headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    });
    if (!reply.ok) throw new Error(await errorOf(reply));
    for await (const data of eventsOf(reply.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      takeUsage(numbers, chunk.usage);
      const choice = chunk.choices[0];
      if (!choice) continue;
      last = performance.now();
      numbers.first ??= (last - began) / 1000;
      if (!chunk.usage) numbers.tokens += 1;
      if (numbers.tokens > 1) numbers.rate = (numbers.tokens - 1) / ((last - began) / 1000 - numbers.first || Infinity);
      if (choice.finish_reason) numbers.finish = choice.ended_by || choice.finish_reason;
      takeDelta(message, choice.delta, (last - began) / 1000);
      changed();
    }
  } catch (error) {
    if (signal.aborted) numbers.finish = "stopped";
    else { numbers.finish = "failed"; message.error = error.message; }
  }
  changed();
}

function takeUsage(numbers, usage) {
  if (!usage) return;
  numbers.tokens = usage.completion_tokens;
  numbers.prompt = usage.prompt_tokens;
  numbers.cached = usage.prompt_tokens_details?.cached_tokens ?? numbers.cached;
  numbers.tiers = usage.prompt_tokens_details?.cached_tokens_by_tier ?? numbers.tiers;
}

function takeDelta(message, delta, seconds) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) {
    message.reasoning = (message.reasoning ?? "") + thought;
    message.thought_seconds = seconds;
  }
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    const calls = message.tool_calls ??= [];
    const call = calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
    if (part.id) call.id = part.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

// What the server is sent of messages: not what the page keeps beside them, and no answer that never came.
function sayable(messages) {
  return messages.filter(({ role, content, tool_calls }) => role !== "assistant" || content || tool_calls?.length).map(
    ({ role, content, tool_calls, tool_call_id }) =>
      ({ role, content, ...(tool_calls?.length ? { tool_calls } : {}), ...(tool_call_id ? { tool_call_id } : {}) }));
}
