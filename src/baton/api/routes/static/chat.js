// The page: a list of chats, one of them open, at most one answer under way.
//
//     send, edit, retry, results  ->  the open chat's messages change  ->  ask()  ->  the last message grows until it has ended

const $ = (id) => document.getElementById(id);
const conversation = $("chat"), input = $("input"), go = $("go"), scroll = $("scroll");
let chat = newChat(), running = null, modelTemperature = 1;

// Messages

const actions = {
  edit(message, text) {
    cutBefore(message);
    send(text);
  },
  retry(message) {
    cutBefore(message);
    ask();
  },
  results(message, answers) {
    message.tool_calls.forEach((call, place) => chat.messages.push({ role: "tool", tool_call_id: call.id, content: answers[place] ?? "" }));
    ask();
  },
  waitsForResults: (message) => chat.messages.at(-1) === message,
};

function cutBefore(message) {
  running?.abort();
  const place = chat.messages.indexOf(message);
  if (place >= 0) chat.messages.length = place;
}

function drawAll() {
  const views = chat.messages.map((message) => {
    if (message.role === "user") return userView(message, actions);
    if (message.role === "tool") return toolView(message);
    const view = answerView(message, actions);
    view.update(false);
    return view.box;
  });
  const empty = element("div", "empty", element("strong", "", "Say something."), "Nothing you write leaves this server.");
  conversation.replaceChildren(...(views.length ? views : [empty]));
  scroll.scrollTop = scroll.scrollHeight;
  $("system").value = chat.system;
  drawChats();
}

function send(text) {
  chat.messages.push({ role: "user", content: text });
  ask();
}

async function ask() {
  const tools = readTools();
  if (tools === null) { drawAll(); return showSettings(true); }
  const asked = chat, control = running = new AbortController(); // another chat may be open when this answer ends
  const messages = [...(asked.system.trim() ? [{ role: "system", content: asked.system }] : []), ...sayable(asked.messages)];
  const message = { role: "assistant", content: "" };
  asked.messages.push(message);
  keepChat(asked);
  drawAll();
  const view = answerView(message, actions);
  conversation.lastChild.replaceWith(view.box);
  view.update(true);
  scroll.scrollTop = scroll.scrollHeight;
  go.textContent = "Stop";

  let drawing = false;
  const draw = () => { // once for each picture, however many events came
    drawing = false;
    if (running !== control) return;
    const atEnd = isAtEnd();
    view.update(true);
    if (atEnd) scroll.scrollTop = scroll.scrollHeight;
  };
  const body = {
    messages, tools,
    temperature: temperatureChosen() ? Number($("temperature").value) : undefined, // else as the model recommends
    max_tokens: Number($("max-tokens").value) || undefined,
    chat_template_kwargs: $("reasoning").value ? { enable_thinking: $("reasoning").value === "on" } : undefined,
  };
  await fetchAnswer(body, message, control.signal, () => {
    if (!drawing) { drawing = true; requestAnimationFrame(draw); }
  });
  const nothing = !message.content && !message.reasoning && !message.tool_calls?.length;
  const place = asked.messages.indexOf(message); // -1 where a retry has cut it off
  if (nothing && message.numbers.finish === "stopped" && place >= 0) asked.messages.splice(place, 1);
  if (asked.messages.length) keepChat(asked);
  if (running !== control) return; // somebody has gone on meanwhile
  const atEnd = isAtEnd();
  running = null;
  go.textContent = "Send";
  if (asked.messages.includes(message)) view.update(false);
  else drawAll();
  if (atEnd) scroll.scrollTop = scroll.scrollHeight;
  drawChats();
  input.focus({ preventScroll: true });
}

function stop() {
  const control = running;
  running = null;
  control?.abort();
  go.textContent = "Send";
}

// Chats

function openChat(found) {
  stop();
  chat = found;
  drawAll();
  document.body.classList.remove("menu");
  input.focus();
}

function drawChats() {
  $("chats").replaceChildren(...readChats().map((each) => {
    const open = element("button", "open", each.title || "Chat"), drop = element("button", "drop", "\u00d7");
    open.type = drop.type = "button";
    open.onclick = () => openChat(each);
    drop.setAttribute("aria-label", "Delete " + (each.title || "chat"));
    drop.onclick = () => {
      dropChat(each.id);
      if (each.id === chat.id) openChat(newChat());
      else drawChats();
    };
    return element("div", "chat-row" + (each.id === chat.id ? " active" : ""), open, drop);
  }));
}

$("clear").onclick = () => openChat({ ...newChat(), system: chat.system });
$("forget").onclick = () => {
  if (!confirm("Delete all chats of this browser?")) return;
  writeChats([]);
  openChat(newChat());
};
$("menu").onclick = () => document.body.classList.toggle("menu");
scroll.onclick = () => document.body.classList.remove("menu");

// Settings

function showSettings(shown) {
  $("settings").hidden = !shown;
  $("settings-button").setAttribute("aria-expanded", String(shown));
}
$("settings-button").onclick = () => showSettings($("settings").hidden);
$("system").oninput = () => { chat.system = $("system").value; keepChat(chat); };
for (const name of ["max-tokens", "reasoning", "tools"]) {
  $(name).value = readSetting(name, "");
  $(name).addEventListener("input", () => writeSetting(name, $(name).value));
}

// undefined: none. null: what is there is no list of tools, and the page says so.
function readTools() {
  const text = $("tools").value.trim();
  let found, problem = "";
  try { found = text ? JSON.parse(text) : undefined; } catch (error) { problem = "not JSON: " + error.message; }
  if (!problem && found !== undefined && !Array.isArray(found)) problem = "not a list: put [ ] around it";
  $("tools-problem").textContent = problem;
  return problem ? null : found?.length ? found : undefined;
}
$("tools").addEventListener("input", readTools);

const temperatureChosen = () => readSetting("temperature", chosenHere) !== "";
let chosenHere = ""; // for a browser that keeps no settings
function chooseTemperature(value) { // "": the model's own
  chosenHere = value;
  writeSetting("temperature", value);
  showTemperature();
}
function showTemperature() {
  const value = readSetting("temperature", chosenHere) || modelTemperature;
  $("temperature").value = value;
  $("temperature-shown").textContent = Number(value).toFixed(2);
  $("temperature-reset").hidden = !temperatureChosen();
}
$("temperature").oninput = () => chooseTemperature($("temperature").value);
$("temperature-reset").onclick = () => chooseTemperature("");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
setTheme(readSetting("theme", matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  writeSetting("theme", theme);
};

// Writing

function grow() { input.style.height = "auto"; input.style.height = input.scrollHeight + "px"; }
$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = input.value.trim();
  if (!text) return;
  input.value = "";
  grow();
  send(text);
};
input.oninput = grow;
input.onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
};
addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });

const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
scroll.onscroll = () => { $("down").hidden = isAtEnd(); };
$("down").onclick = () => { scroll.scrollTop = scroll.scrollHeight; };

fetch(at("v1/models")).then((answer) => answer.json()).then((answer) => {
  const model = answer.data[0];
  $("model").textContent = model.id + " \u00b7 " + model.max_model_len.toLocaleString() + " tokens of context";
  modelTemperature = model.sampling_defaults.temperature;
  showTemperature();
}).catch(() => { $("model").textContent = "the server does not answer"; });
drawAll();
