// Markdown to DOM nodes. Nothing is ever parsed as HTML: whatever a model writes becomes text of elements that are made here.
//
//     text -> blocks (lines) -> elements; text within a block -> inline() -> text nodes, code, bold, links
//
// While an answer comes it is rendered again and again. Blocks whose source is the same as before keep their elements, so
// that only the last one is made anew. Nesting is bounded, and no pattern goes back over what it has read: a hostile answer
// costs time in proportion to its length.

const NESTING_MAX = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const TABLE_RULE = /^[ \t]*\|?[ \t]*:?-+[-:| \t]*$/;

const element = (tag, className, ...children) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
};

function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  let at = 0;
  const take = (kind, count, more) => {
    blocks.push({ kind, source: kind + "\n" + lines.slice(at, at + count).join("\n"), lines: lines.slice(at, at + count), ...more });
    at += count;
  };
  const run = (from, goesOn) => {
    let end = from;
    while (end < lines.length && goesOn(lines[end], end)) end += 1;
    return end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const end = run(at + 1, (each) => !(each.trim().startsWith(fence[1]) && !each.trim().replaceAll(fence[1][0], "")));
      const code = lines.slice(at + 1, end).join("\n");
      take("code", Math.min(end + 1, lines.length) - at, { language: fence[2].trim().split(/\s/)[0], code });
    } else if (HEADING.test(line)) take("heading", 1);
    else if (RULE.test(line)) take("rule", 1);
    else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_RULE.test(lines[at + 1]))
      take("table", run(at + 2, (each) => each.includes("|")) - at);
    else if (line.startsWith(">")) take("quote", run(at, (each) => each.startsWith(">")) - at);
    else if (ITEM.test(line)) {
      // An empty line ends a list, unless what follows is indented or another item.
      take("list", run(at, (each, place) =>
        ITEM.test(each) || /^[ \t]/.test(each) && each.trim() ||
        !each.trim() && place + 1 < lines.length && (/^[ \t]+\S/.test(lines[place + 1]) || ITEM.test(lines[place + 1]))) - at);
    } else take("text", run(at, (each, place) => each.trim() && (place === at || !startsBlock(each))) - at);
  }
  return blocks;
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || line.startsWith(">") || ITEM.test(line);

function renderBlock(block, depth) {
  switch (block.kind) {
    case "code": return codeBlock(block.code, block.language);
    case "rule": return element("hr");
    case "heading": {
      const [, marks, words] = HEADING.exec(block.lines[0]);
      return inline(element("h" + Math.min(marks.length + 1, 6)), words.replace(/[ \t]#+[ \t]*$/, ""), 0);
    }
    case "quote": return nested(element("blockquote"), block.lines.map((line) => line.replace(/^> ?/, "")), depth);
    case "list": return list(block.lines, depth);
    case "table": return table(block.lines);
    default: return inline(element("p"), block.lines.map((line) => line.trim()).join("\n"), 0);
  }
}

function nested(parent, lines, depth) {
  const text = lines.join("\n");
  if (depth >= NESTING_MAX) parent.append(text);
  else for (const block of blocksOf(text)) parent.append(renderBlock(block, depth + 1));
  return parent;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark) && parseInt(mark) !== 1) made.start = parseInt(mark);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^(?:\t| {1,4})/, ""));
  }
  for (const item of items) {
    const box = element("li");
    // An item of one line is no paragraph of its own: it would stand too far from its neighbours.
    if (item.slice(1).every((line) => !line.trim())) inline(box, item[0], 0);
    else {
      nested(box, item, depth);
      const first = box.firstChild;
      if (first && first.tagName === "P") first.replaceWith(...first.childNodes);
    }
    made.append(box);
  }
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, line) => element("tr", "", ...cells(line).slice(0, sides.length).map((cell, place) => {
    const made = inline(element(tag), cell, 0);
    if (sides[place]) made.style.textAlign = sides[place];
    return made;
  }));
  const head = element("thead", "", row("th", lines[0])), body = element("tbody", "", ...lines.slice(2).map((line) => row("td", line)));
  return element("div", "table", element("table", "", head, body));
}

function codeBlock(code, language) {
  const button = element("button", "plain", "Copy");
  button.type = "button";
  button.onclick = () => copyText(code, button);
  const head = element("div", "code-head", element("span", "", language || "text"), button);
  return element("div", "code", head, element("pre", "", element("code", "", code)));
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard where the page came over plain http from another machine
    const area = element("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

// Within a block

const WORD = /[\p{L}\p{N}]/u;
const STYLES = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };

function inline(parent, text, depth) {
  const missing = new Set(); // marks that nothing closes: looked for once
  let plain = "", at = 0;
  const put = (node) => {
    if (plain) parent.append(plain);
    plain = "";
    parent.append(node);
  };
  while (at < text.length) {
    const char = text[at];
    const found =
      char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } :
      char === "\n" ? { node: element("br"), end: at + 1 } :
      char === "`" ? codeSpan(text, at, missing) :
      char === "[" || (char === "!" && text[at + 1] === "[") ? link(text, at, depth) :
      char === "h" && !WORD.test(text[at - 1] ?? "") ? address(text, at) :
      "*_~".includes(char) && depth < NESTING_MAX ? styled(text, at, depth, missing) : null;
    if (!found) { plain += char; at += 1; continue; }
    if (found.node) put(found.node); else plain += found.text;
    at = found.end;
  }
  if (plain) parent.append(plain);
  return parent;
}

function codeSpan(text, at, missing) {
  let from = at;
  while (text[from] === "`") from += 1;
  const mark = text.slice(at, from);
  if (missing.has(mark)) return { text: mark, end: from };
  for (let end = text.indexOf(mark, from); end >= 0;) {
    let after = end;
    while (text[after] === "`") after += 1;
    if (after - end === mark.length) {
      const code = text.slice(from, end);
      return { node: element("code", "", code.trim() && /^ .* $/s.test(code) ? code.slice(1, -1) : code), end: after };
    }
    end = text.indexOf(mark, after);
  }
  missing.add(mark);
  return { text: mark, end: from };
}

function styled(text, at, depth, missing) {
  const char = text[at], mark = text[at + 1] === char ? char + char : char;
  const from = at + mark.length, asText = { text: mark, end: from };
  if (!STYLES[mark] || missing.has(mark) || !text[from] || /\s/.test(text[from])) return asText;
  if (char === "_" && WORD.test(text[at - 1] ?? "")) return asText; // snake_case
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    const closes = end > from && !/\s/.test(text[end - 1]) && !(char === "_" && WORD.test(text[end + mark.length] ?? ""));
    const other = mark.length === 1 && (text[end + 1] === char || text[end - 1] === char);
    if (closes && !other) {
      while (mark.length === 2 && text[end + 2] === char) end += 1; // ***both***: the outer mark is the last one
      return { node: inline(element(STYLES[mark]), text.slice(from, end), depth + 1), end: end + mark.length };
    }
  }
  missing.add(mark);
  return asText;
}

const LABEL_MAX = 1000, ADDRESS_MAX = 2000;

function link(text, at, depth) {
  const from = at + (text[at] === "!" ? 2 : 1);
  const near = text.slice(from, from + LABEL_MAX + ADDRESS_MAX);
  const middle = near.indexOf("]("), newline = near.indexOf("\n");
  if (middle < 0 || middle > LABEL_MAX || (newline >= 0 && newline < middle) || depth >= NESTING_MAX) return null;
  const close = near.indexOf(")", middle);
  if (close < 0) return null;
  const target = near.slice(middle + 2, close).trim().split(/\s/)[0];
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return null; // and no other scheme
  return { node: inline(anchor(target), near.slice(0, middle) || target, depth + 1), end: from + close + 1 };
}

function address(text, at) {
  const near = text.slice(at, at + ADDRESS_MAX);
  const found = /^https?:\/\/[^\s<>"`]+/.exec(near);
  if (!found) return null;
  const target = found[0].replace(/[.,;:!?*_~'\])]+$/, "");
  const made = anchor(target);
  made.append(target);
  return { node: made, end: at + target.length };
}

function anchor(target) {
  const made = element("a");
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function renderMarkdown(box, text) {
  const blocks = blocksOf(text), before = box.sources ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same].source === before[same]) same += 1;
  while (box.childNodes.length > same) box.lastChild.remove();
  for (const block of blocks.slice(same)) box.append(renderBlock(block, 0));
  box.sources = blocks.map((block) => block.source);
}
