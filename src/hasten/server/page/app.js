// The page of a hasten server: a chat, and beside it a live map of the engine. Text from models, users and servers
// enters the page as text nodes only.
"use strict";

const $ = (id) => document.getElementById(id);

/** Make an element. Attributes come from this file; children that are strings become text nodes. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// -- the server ------------------------------------------------------------------------------------------------------

const KEY = "hasten-key";
let asking = null; // the promise of a key that is being asked for
let keyRefused = false; // the dialog was canceled: it does not come up again

/** Fetch from this server with the key, which is asked for when it is needed. Throws with the server's own message. */
async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) {
      if (answer.ok) return answer;
      const body = await answer.json().catch(() => null);
      throw new Error(body?.error?.message ?? `the server answered ${answer.status}`);
    }
    if (keyRefused) throw new Error("this server needs a key; reload the page to enter one");
    if (key === sessionStorage.getItem(KEY)) { // else another call has just been given one
      asking ??= askKey(key === null ? "This server needs a key." : "The server does not know this key.");
      await asking;
      asking = null;
    }
  }
}

function askKey(why) {
  const dialog = $("ask-key");
  $("key-why").textContent = why;
  $("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      keyRefused = dialog.returnValue !== "given";
      if (!keyRefused) sessionStorage.setItem(KEY, $("key").value.trim());
      resolve();
    }, { once: true });
  });
}

/** Yield the JSON of each event of a stream. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// -- Markdown: paragraphs, headings, lists, quotes, code, emphasis ---------------------------------------------------

const KINDS = [[/^\s*[-*+] /, "ul"], [/^\s*\d+[.)] /, "ol"], [/^>/, "quote"], [/^/, "p"]];

/** Split a text into blocks {kind, source}; one that is still growing is the last. */
function blocksOf(text) {
  const blocks = [];
  let fence = null, block = null;
  const begin = (kind, source) => blocks.push(block = { kind, source });
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})(.*)$/);
    if (fence !== null) {
      if (mark && mark[1].startsWith(fence) && !mark[2].trim()) fence = block = null;
      else block.source += `${line}\n`;
    } else if (mark) {
      fence = mark[1];
      begin("code", "");
      block.language = mark[2].trim();
    } else if (!line.trim()) {
      block = null;
    } else if (/^#{1,6} /.test(line)) {
      begin("heading", line);
      block = null;
    } else {
      const kind = KINDS.find(([pattern]) => pattern.test(line))[1];
      const goesOn = block && (block.kind === kind || (kind === "p" && block.kind !== "quote"));
      if (goesOn) block.source += `\n${line}`;
      else begin(kind, line);
    }
  }
  return blocks;
}

/** The nodes of a text: `code`, **strong**, *emphasis*; everything else is text. */
function inline(text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/);
  return parts.map((part, i) => {
    if (i % 2 === 0) return part;
    if (part[0] === "`") return element("code", {}, part.slice(1, -1));
    return part.startsWith("**") ? element("strong", {}, part.slice(2, -2)) : element("em", {}, part.slice(1, -1));
  });
}

function blockNode({ kind, source, language }) {
  if (kind === "code") {
    const bar = element("div", { class: "bar" }, element("span", {}, language || "code"));
    bar.append(copyButton(() => source, "Copy code"));
    return element("div", { class: "code" }, bar, element("pre", { tabindex: "0" }, element("code", {}, source)));
  }
  if (kind === "heading") {
    const level = source.indexOf(" ");
    return element(`h${Math.min(6, 2 + level)}`, {}, ...inline(source.slice(level + 1)));
  }
  if (kind === "quote") return element("blockquote", {}, ...inline(source.replace(/^> ?/gm, "")));
  if (kind === "p") return element("p", {}, ...inline(source));
  const items = source.split(/\n(?=\s*(?:[-*+]|\d+[.)]) )/).map((item) => item.replace(/^\s*\S+ /, ""));
  const start = kind === "ol" ? source.match(/\d+/)[0].slice(0, 9) : null;
  return element(kind, { start }, ...items.map((item) => element("li", {}, ...inline(item))));
}

/** Show a Markdown text in a node; blocks that did not change keep their nodes, so that a selection stays. */
function showMarkdown(node, text) {
  const blocks = blocksOf(text), old = node.blocks ?? [];
  const changed = blocks.findIndex((block, i) => JSON.stringify(block) !== JSON.stringify(old[i]));
  const kept = changed < 0 ? blocks.length : changed;
  while (node.childNodes.length > kept) node.lastChild.remove();
  node.append(...blocks.slice(kept).map(blockNode));
  node.blocks = blocks;
}

function copyButton(text, name) {
  const button = element("button", { type: "button", "aria-label": name }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
      say("Copied.");
    } catch (error) { // without permission, or from another machine without TLS
      say(`Not copied: ${error.message}`);
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// -- the chat --------------------------------------------------------------------------------------------------------

const TURNS = "hasten-turns", SETTINGS = "hasten-settings";
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "n", "thinking", "theme"];
const views = new WeakMap(); // of samples: what shows them
let turns = []; // {role: "user", text}, {role: "assistant", samples: [{text, reasoning, note}], chosen, note, failed}
let leaving = false; // the page is being left or reloaded, which ends its requests
let running = null; // the AbortController of the answer that is being written

const say = (text) => { $("status").textContent = text; };

/** Keep the conversation in this tab, so that a reload shows it again. */
function save() {
  try {
    sessionStorage.setItem(TURNS, JSON.stringify(turns));
  } catch (error) { // it is longer than the browser keeps
    say(`Not kept over a reload: ${error.message}`);
  }
}

/** The conversation as the API takes it, without turns that failed and what asked for them. */
function messages() {
  const system = $("system").value.trim();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const [i, turn] of turns.entries()) {
    if (turn.role === "user" && !turns[i + 1]?.failed) found.push({ role: "user", content: turn.text });
    if (turn.role === "user" || turn.failed) continue;
    const { text, reasoning } = turn.samples[turn.chosen];
    found.push({ role: "assistant", content: text, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  }
  return found;
}

let offered = null; // the promise of the models' names

/** Offer the names of the server's models; asked for again if it failed. */
function models() {
  offered ??= (async () => {
    const { data } = await (await call("/v1/models")).json();
    $("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    document.title = `${data[0].id} · hasten`;
  })().catch((error) => {
    offered = null;
    throw error;
  });
  return offered;
}

function request(messages) {
  const body = { model: $("model").value, messages, stream: true };
  for (const name of ["temperature", "top_p", "max_tokens", "seed", "n"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  if ($("thinking").value === "off") body.reasoning_effort = "none";
  if ($("thinking").value === "on") body.chat_template_kwargs = { enable_thinking: true };
  return body;
}

/** Have the conversation's last turn answered. */
async function answer() {
  const asked = messages(), length = Math.max(1, Number($("n").value));
  const samples = Array.from({ length }, () => ({ text: "", reasoning: "", note: "" }));
  const turn = { role: "assistant", samples, chosen: 0, note: "", failed: false };
  const stopping = running = new AbortController();
  turns.push(turn);
  busy(true);
  draw();
  say("Answering …");
  try {
    await models();
    const headers = { "Content-Type": "application/json" }, body = JSON.stringify(request(asked));
    const options = { method: "POST", headers, body, signal: stopping.signal };
    for await (const chunk of events(await call("/v1/chat/completions", options))) take(turn, chunk);
    say("The answer is complete.");
  } catch (error) {
    if (!leaving) cutShort(turn, stopping.signal.aborted ? "Stopped." : `Error: ${error.message}`);
    say(turn.note);
  }
  running = null;
  busy(false);
  save();
  draw();
}

function cutShort(turn, why) {
  turn.note = why;
  turn.failed = turn.samples.every((sample) => !sample.text);
}

function take(turn, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const { index, delta, finish_reason: reason } of chunk.choices) {
    const sample = turn.samples[index];
    sample.text += delta.content ?? "";
    sample.reasoning += delta.reasoning_content ?? "";
    if (reason === "length") sample.note = "Cut at the most tokens.";
    showSoon(sample);
  }
  const times = chunk.timings;
  if (times) turn.note = `${times.predicted_n} tokens, ${times.predicted_per_second.toFixed(1)} tokens/s`;
}

/** Show a sample's text in the nodes that were made for it. */
function show(sample) {
  const view = views.get(sample);
  view.reasoning.hidden = !sample.reasoning;
  view.thoughts.textContent = sample.reasoning;
  showMarkdown(view.text, sample.text);
  view.note.textContent = sample.note;
}

/** Show what has come of a sample before the next frame, however many tokens come until then. */
function showSoon(sample) {
  const view = views.get(sample);
  view.frame ??= requestAnimationFrame(() => {
    const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    view.frame = null;
    show(sample);
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
  $("log").setAttribute("aria-busy", on); // screen readers wait until the answer is complete
}

/** Draw the whole conversation; an answer that is being written changes by `showSoon`. */
function draw() {
  const nodes = turns.map((turn, i) => (turn.role === "user" ? userNode(turn, i) : answerNode(turn, i)));
  $("log").replaceChildren(...nodes);
  $("hint").hidden = turns.length > 0;
  $("log").scrollTop = $("log").scrollHeight;
}

function action(text, name, onclick) {
  return element("button", { type: "button", "aria-label": name, disabled: running !== null, onclick }, text);
}

const actions = (...children) => element("div", { class: "actions" }, ...children);

function userNode(turn, i) {
  const said = element("p", { class: "said" }, turn.text);
  const node = element("article", { class: "turn user", "aria-label": "You" }, said);
  node.append(actions(action("Edit", "Edit this message", () => edit(turn, i, node))));
  return node;
}

function edit(turn, i, node) {
  const field = element("textarea", { rows: "3", "aria-label": "Edited message" });
  field.value = turn.text;
  const submit = () => {
    if (!field.value.trim() || running) return;
    turns = [...turns.slice(0, i), { role: "user", text: field.value.trim() }];
    $("message").focus();
    answer();
  };
  const cancel = () => {
    draw();
    $("log").children[i].querySelector("button").focus();
  };
  onEnter(field, submit);
  field.addEventListener("keydown", (event) => { if (event.key === "Escape") cancel(); });
  const buttons = [action("Send", "Send the edited message", submit), action("Cancel", "Cancel editing", cancel)];
  node.replaceChildren(field, actions(...buttons));
  field.focus();
}

function answerNode(turn, i) {
  const several = turn.samples.length > 1;
  const samples = turn.samples.map((sample, number) => sampleNode(turn, sample, number, several));
  const retry = action("Retry", "Retry this answer", () => {
    turns = turns.slice(0, i);
    $("message").focus();
    answer();
  });
  const note = element("span", { class: turn.failed ? "note error" : "note" }, turn.note);
  if (!several) samples[0].lastChild.append(retry, note); // in one row with what is there
  const shown = several ? [element("div", { class: "samples" }, ...samples), actions(retry, note)] : samples;
  return element("article", { class: "turn", "aria-label": "Model" }, ...shown);
}

function sampleNode(turn, sample, number, several) {
  const view = { text: element("div", { class: "text" }), thoughts: element("div", { class: "thoughts" }) };
  view.note = element("span", { class: "note" });
  view.reasoning = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), view.thoughts);
  views.set(sample, view);
  show(sample);
  const foot = actions(copyButton(() => sample.text, "Copy this answer"), view.note);
  if (several) {
    const taken = turn.chosen === number, verb = taken ? "Chosen" : "Choose";
    const choose = action(verb, `${verb}: sample ${number + 1}`, () => {
      turn.chosen = number;
      save();
      draw();
    });
    choose.setAttribute("aria-pressed", taken);
    foot.prepend(choose);
  }
  const name = several ? `Sample ${number + 1}` : null;
  return element("section", { class: "sample", "aria-label": name }, view.reasoning, view.text, foot);
}

function send() {
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  turns.push({ role: "user", text });
  answer();
}

/** Call a function at Enter; with Shift it is a new line, and within an input method it ends a word. */
function onEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
}

// -- the engine ------------------------------------------------------------------------------------------------------

const RECENT = 1500; // milliseconds that a copied block is marked
const FREE = 0, CACHED = 1; // in the map; other numbers are marks of sequences
const copied = new Map(); // block -> when it was seen
let watching = null, shownMap = null, highest = 0, wait = 0;

/** The color of a sequence, from the mark that its blocks have in the map: neighbors differ most. */
const colorOf = (mark, lightness) => `hsl(${(mark * 137.5) % 360} 55% ${lightness})`;
const share = (part) => (part === null ? "–" : `${(100 * part).toFixed(0)}%`);
const perSecond = (value) => `${value.toFixed(value < 100 ? 1 : 0)} tok/s`;
const inMs = (seconds) => (seconds === null ? "–" : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`);

/** Follow the engine while the page and its panel are seen: nobody watching costs the server nothing. */
async function watch() {
  if (watching || document.hidden || $("engine").hidden) return;
  const ending = watching = new AbortController();
  try {
    for await (const event of events(await call("/v1/hasten/live", { signal: ending.signal }))) {
      if (event.error) throw new Error(event.error.message);
      wait = 0;
      showEngine(event);
    }
    throw new Error("the server closed the stream");
  } catch (error) {
    if (ending.signal.aborted) return;
    $("live-state").textContent = `Not connected: ${error.message}.`;
    watching = null;
    wait = Math.min(30000, 2 * wait + 1000);
    if (!keyRefused) setTimeout(watch, wait);
  }
}

function unwatch() {
  watching?.abort();
  watching = null;
}

function showEngine({ blocks, sequences, rates, queue, latency, kernels, machine }) {
  const values = {
    "live-state": "Live",
    "rate-generation": perSecond(rates.generation),
    "rate-prompt": perSecond(rates.prompt),
    "rate-mbu": share(rates.mbu),
    "rate-accepted": share(rates.accepted),
    running: `${queue.running}`,
    waiting: `${queue.waiting}`,
    ttft: inMs(latency.ttft_p50),
    itl: inMs(latency.itl_p50),
  };
  for (const [id, value] of Object.entries(values)) if ($(id).textContent !== value) $(id).textContent = value;
  if (machine) $("machine").textContent = machine;
  if (kernels) $("kernels").replaceChildren(...kernels.map(kernelNode));
  if (blocks) showBlocks(blocks);
  else $("map-text").textContent = "Not available here: the blocks are in other processes.";
  $("map").hidden = $("legend").hidden = !blocks;
  $("sequences").replaceChildren(...sequences.map(sequenceRow));
  $("no-sequences").hidden = sequences.length > 0;
}

function kernelNode({ part, kernel, why }) {
  const summary = element("summary", {}, `${part}: `, element("strong", {}, kernel));
  const reasons = why.map(({ kernel: other, reason }) => element("li", {}, `not ${other}: ${reason}`));
  return element("details", {}, summary, element("ul", {}, ...reasons));
}

function sequenceRow({ id, colour, tokens, computed, speed }) {
  const swatch = element("i", { class: "swatch" });
  swatch.style.backgroundColor = colorOf(colour, "var(--map-used)");
  const cells = [tokens, computed, speed.toFixed(1)].map((value) => element("td", {}, `${value}`));
  return element("tr", {}, element("th", { scope: "row" }, swatch, `${id}`), ...cells);
}

function showBlocks({ size, total, free, map, shared, copied: news }) {
  const marks = Uint8Array.from(atob(map), (c) => c.charCodeAt(0)); // the free blocks at the end are left out
  const now = performance.now(), cached = marks.reduce((count, mark) => count + (mark === CACHED), 0);
  for (const block of news) copied.set(block, now);
  for (const [block, seen] of copied) if (now - seen > RECENT) copied.delete(block);
  highest = Math.max(highest, marks.length);
  shownMap = { marks, shared: new Map(shared), total, wanted: Math.max(256, 2 ** Math.ceil(Math.log2(highest + 1))) };
  const counts = `${total - free} of ${total} blocks in use, ${shared.length} shared, ${cached} cached`;
  const rest = grid().cells < total ? " Others, never used, are not shown." : "";
  $("map-text").textContent = `${counts}; ${size} tokens a block.${rest}`;
  $("map").setAttribute("aria-label", `Blocks of the KV cache: ${counts}`);
  Object.assign($("map").dataset, { used: total - free, shared: shared.length, cached, copied: copied.size });
  drawMap();
}

/** Where blocks are drawn: the largest cells with which the map is at most 300 pixels high. */
function grid() {
  const width = $("map").parentElement.clientWidth, wanted = Math.min(shownMap.wanted, shownMap.total);
  const fits = (cell) => Math.ceil(wanted / Math.floor(width / cell)) * cell <= 300;
  const cell = [16, 13, 11, 9, 7, 6, 5, 4].find(fits) ?? 3, columns = Math.floor(width / cell);
  const rows = Math.ceil(wanted / columns);
  return { width, cell, columns, height: rows * cell, cells: Math.min(rows * columns, shownMap.total) };
}

function drawMap() {
  if (!shownMap || $("engine").hidden) return;
  const { width, cell, columns, height, cells } = grid(), zoom = window.devicePixelRatio, canvas = $("map");
  Object.assign(canvas, { width: width * zoom, height: height * zoom });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const style = getComputedStyle($("legend")), paint = canvas.getContext("2d"), inner = cell - (cell > 5 ? 2 : 1);
  const [used, accent, text] = ["--map-used", "--accent", "--text"].map((name) => style.getPropertyValue(name));
  const plain = ["--map-free", "--map-cached"].map((name) => style.getPropertyValue(name));
  paint.scale(zoom, zoom);
  for (let block = 0; block < cells; block++) {
    const mark = shownMap.marks[block] ?? FREE, x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
    paint.fillStyle = plain[mark] ?? colorOf(mark, used);
    paint.fillRect(x, y, inner, inner);
    paint.fillStyle = text;
    if (shownMap.shared.has(block)) paint.fillRect(x + inner / 3, y + inner / 3, inner / 3, inner / 3);
    Object.assign(paint, { strokeStyle: accent, lineWidth: 2 });
    if (copied.has(block)) paint.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
  }
}

function describeBlock(event) {
  if (!shownMap) return;
  const { cell, columns, cells } = grid();
  const block = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
  const mark = shownMap.marks[block] ?? FREE, owners = shownMap.shared.get(block) ?? 1;
  const used = owners > 1 ? `shared by ${owners} sequences` : "of one sequence";
  const what = ["free", "a cached prefix"][mark] ?? used, news = copied.has(block) ? ", copied just now" : "";
  $("map-block").textContent = block < cells ? `Block ${block}: ${what}${news}` : "";
}

// -- the beginning ---------------------------------------------------------------------------------------------------

function applySettings() {
  document.documentElement.dataset.theme = $("theme").value;
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(FIELDS.map((id) => [id, $(id).value]))));
  drawMap();
}

function toggleEngine(shown) {
  $("engine").hidden = !shown;
  document.body.classList.toggle("with-engine", shown);
  $("toggle-engine").setAttribute("aria-expanded", shown);
  if (shown) watch();
  else unwatch();
}

function newChat() {
  running?.abort();
  turns = [];
  save();
  draw();
  say("");
  $("message").focus();
}

function listen() {
  const on = (id, kind, act) => $(id).addEventListener(kind, act);
  on("composer", "submit", (event) => {
    event.preventDefault();
    send();
  });
  onEnter($("message"), send);
  on("stop", "click", () => {
    running?.abort();
    $("message").focus();
  });
  on("new", "click", newChat);
  on("open-settings", "click", () => $("settings").showModal());
  on("settings", "change", applySettings);
  on("no-key", "click", () => $("ask-key").close(""));
  on("toggle-engine", "click", () => toggleEngine($("engine").hidden));
  on("map", "pointermove", describeBlock);
  on("map", "pointerleave", () => { $("map-block").textContent = ""; });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? unwatch() : watch()));
  window.addEventListener("resize", drawMap);
  window.addEventListener("pageshow", () => { leaving = false; }); // also when the browser brings it back
  window.addEventListener("pagehide", () => {
    leaving = true;
    if (running) cutShort(turns.at(-1), "Interrupted.");
    save();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

function start() {
  const known = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  for (const id of FIELDS) $(id).value = known[id] ?? "";
  applySettings();
  turns = JSON.parse(sessionStorage.getItem(TURNS) ?? "[]");
  draw();
  listen();
  toggleEngine(matchMedia("(min-width: 900px)").matches);
  models().catch((error) => say(`Error: ${error.message}`));
}

start();
