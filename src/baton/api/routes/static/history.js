// Chats are kept in this browser alone, in localStorage: the newest CHATS_MAX of them, and fewer where the browser has no
// room. Each write merges with what is stored, so that two tabs do not undo each other.

const CHATS_MAX = 100, STORED_AT = "baton.chats";

const newChat = () => ({ id: crypto.randomUUID?.() ?? String(Date.now()) + Math.random(), title: "", system: "", changed: Date.now(), messages: [] });

function readChats() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED_AT) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => chat && Array.isArray(chat.messages)) : [];
  } catch { return []; } // no storage, or not ours
}

function writeChats(chats) {
  const kept = chats.sort((one, other) => other.changed - one.changed).slice(0, CHATS_MAX);
  while (kept.length) {
    try { return localStorage.setItem(STORED_AT, JSON.stringify(kept)); } catch { kept.pop(); } // full: without the oldest
  }
  try { localStorage.removeItem(STORED_AT); } catch { /* no storage: the page works without */ }
}

function keepChat(chat) {
  if (!chat.messages.length) return;
  chat.changed = Date.now();
  chat.title ||= (chat.messages.find((message) => message.role === "user")?.content ?? "").replace(/\s+/g, " ").slice(0, 80);
  writeChats([chat, ...readChats().filter((other) => other.id !== chat.id)]);
}

const dropChat = (id) => writeChats(readChats().filter((chat) => chat.id !== id));

function readSetting(name, otherwise) {
  try { return localStorage.getItem("baton." + name) ?? otherwise; } catch { return otherwise; }
}

function writeSetting(name, value) {
  try { value === "" ? localStorage.removeItem("baton." + name) : localStorage.setItem("baton." + name, value); } catch { /* not kept */ }
}
