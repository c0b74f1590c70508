// How one message looks. `actions` are what its buttons do (chat.js).

const action = (label, run) => {
  const made = element("button", "plain", label);
  made.type = "button";
  made.onclick = () => run(made);
  return made;
};

const goButton = (label, run) => {
  const made = action(label, run);
  made.className = "go";
  return made;
};

function userView(message, actions) {
  const box = element("div", "message user", element("div", "text", message.content));
  const below = element("div", "below", action("Copy", (button) => copyText(message.content, button)));
  below.append(action("Edit", () => editView(box, message, actions)));
  box.append(below);
  return box;
}

function editView(box, message, actions) {
  const area = element("textarea");
  area.value = message.content;
  area.rows = Math.min(12, message.content.split("\n").length + 1);
  const cancel = action("Cancel", () => box.replaceWith(userView(message, actions)));
  const save = goButton("Send", () => area.value.trim() && actions.edit(message, area.value.trim()));
  area.onkeydown = (event) => {
    if (event.key === "Escape") cancel.onclick();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save.onclick(); }
  };
  box.replaceChildren(element("div", "edit", area, element("div", "", cancel, save)));
  area.focus();
}

const toolView = (message) => element("div", "message tool", element("div", "text", message.content));

// An answer is drawn into the same elements while it comes: `update()`.
function answerView(message, actions) {
  const summary = element("summary"), thinking = element("div", "thinking markdown");
  const thought = element("details", "thought", summary, thinking);
  const text = element("div", "text markdown"), calls = element("div", "calls"), failure = element("div", "failure");
  const numbers = element("span", "numbers"), below = element("div", "below");
  const box = element("div", "message assistant", thought, text, calls, failure, below);
  thought.ontoggle = () => thought.open && renderMarkdown(thinking, message.reasoning ?? "");

  const update = (running) => {
    const empty = !message.content && !message.tool_calls?.length;
    thought.hidden = !message.reasoning;
    if (message.reasoning) {
      const seconds = (message.thought_seconds ?? 0).toFixed(1) + " s";
      summary.textContent = running && empty ? "Thinking, " + seconds : "Thought for " + seconds;
      if (thought.open) renderMarkdown(thinking, message.reasoning); // what is folded is not drawn
    }
    renderMarkdown(text, message.content);
    text.classList.toggle("waiting", running && empty);
    if (!running && empty && !message.error && !message.reasoning) text.textContent = "(no text)";
    calls.replaceChildren(...(message.tool_calls ?? []).map((call) => callView(call, running)));
    if (!running && message.tool_calls?.length && actions.waitsForResults(message))
      calls.append(goButton("Send results", () => actions.results(message, [...calls.querySelectorAll("textarea")].map((area) => area.value))));
    failure.hidden = !message.error;
    failure.textContent = message.error ?? "";
    numbers.replaceChildren(...factsOf(message.numbers).map((fact) => element("span", "", fact)));
    const buttons = running ? [] : [
      message.content && action("Copy", (button) => copyText(message.content, button)),
      action("Retry", () => actions.retry(message)),
    ];
    below.replaceChildren(...buttons.filter(Boolean), numbers);
  };

  const callView = (call, running) => {
    const made = element("div", "call", element("div", "call-name", "calls ", element("b", "", call.function.name)));
    made.append(element("pre", "", pretty(call.function.arguments)));
    if (!running && actions.waitsForResults(message)) {
      const area = element("textarea");
      area.placeholder = "What the tool answers";
      area.rows = 1;
      made.append(area);
    }
    return made;
  };
  return { box, update };
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; } // not complete yet
}

function factsOf(numbers) {
  if (!numbers) return [];
  const tiers = numbers.tiers ? " (" + numbers.tiers.host + " from host, " + numbers.tiers.storage + " from storage)" : "";
  return [
    numbers.rate && numbers.rate.toFixed(1) + " tokens/s",
    numbers.first !== undefined && "first token " + numbers.first.toFixed(2) + " s",
    numbers.tokens + " tokens",
    numbers.cached !== undefined && numbers.cached + " of " + numbers.prompt + " prompt tokens cached" + tiers,
    { length: "ended by length", stopped: "stopped", failed: "failed" }[numbers.finish],
  ].filter(Boolean);
}
