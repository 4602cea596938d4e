// The page: a chat with the endpoint beside it, each answer drawn as the rounds that made it.
//
// Order of this file: small helpers, the API, one answer (Lane), the panel with a round's tree, turns and races, the
// controls. No library, no build step, nothing fetched from elsewhere.

const $ = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** An SVG element with attributes and children. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;
const milliseconds = (ms) => `${ms.toFixed(ms < 99.5 ? 1 : 0)} ms`;
const wait = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Tell a screen reader. */
function announce(text) {
  $("status").textContent = text;
}

// ---- The API

/** A failure that can be shown as it is. */
class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const settings = {
  get key() { return sessionStorage.getItem("graft-key") ?? ""; },
  set key(value) { value ? sessionStorage.setItem("graft-key", value) : sessionStorage.removeItem("graft-key"); },
  get temperature() { return Number($("temperature").value); },
  get maxTokens() { return Math.max(1, Math.round(Number($("max-tokens").value)) || 256); },
  get model() { return $("model").value; },
};

async function call(path, body, signal) {
  const headers = { Accept: "application/json" };
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** What the server said, as a sentence. */
async function refusal(response) {
  let message = "";
  try {
    const text = await response.text();
    message = text.slice(0, 400);
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // Not the API's own error: a proxy's page, or nothing. The text, or the status alone, must do.
  }
  if (response.status === 401) {
    return new Problem(settings.key ? "The API key was not accepted." : "This server asks for an API key.", 401);
  }
  const after = response.headers.get("Retry-After");
  const hint = after && response.status === 429 ? ` It asks to wait ${after}\u00a0s.` : "";
  const said = message ? sentence(message) : `The server answered with status ${response.status}.`;
  return new Problem(said + hint, response.status);
}

function sentence(text) {
  const trimmed = text.trim();
  const start = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

/** The data of each server-sent event, parsed; throws if the stream breaks off or reports an error. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) throw new Problem("The connection ended before the answer was complete.");
    const lines = (pending + part.value).split("\n");
    pending = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(sentence(event.error.message ?? "The answer failed"));
      yield event;
    }
  }
}

/** Ask for a streamed answer; `method` null is the server's own policy. */
async function* chat(messages, method, seed, signal) {
  const body = {
    model: settings.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: settings.maxTokens,
    temperature: settings.temperature,
    graft: { rounds: true, metrics: true, ...(method && { method }) },
  };
  if (settings.temperature > 0) body.seed = seed;
  yield* events(await call("v1/chat/completions", body, signal));
}

// ---- One answer

const SPARK_BARS = 56;

/** An answer and its numbers. Keeps what arrived and when, so that a race can be shown again. */
class Lane {
  constructor(title, isPlain = false) {
    this.isPlain = isPlain;
    this.heading = make("b", {}, title);
    this.subtitle = make("span");
    this.answer = make("div", { className: "answer" });
    this.answer.setAttribute("role", "group");
    this.answer.setAttribute("aria-label", "Answer. Left and right arrow keys move between its rounds.");
    this.length = make("b", { textContent: "–" });
    this.budget = make("b", { textContent: "–" });
    this.speed = make("b", { textContent: "–" });
    this.spark = draw("svg", { class: "spark", width: SPARK_BARS * 5, height: 34, "aria-hidden": "true" });
    const meter = (value, name, title) => make("div", { className: "meter", title }, value, make("small", {}, name));
    this.meters = make("div", { className: "meters", hidden: true },
      meter(this.length, "tokens a round", "Acceptance length: tokens committed for each pass of the model, on average"),
      meter(this.budget, "budget", "Draft nodes checked in a round, on average"),
      meter(this.speed, "tokens/s", "From the first token on, as this page saw them arrive"),
      this.spark);
    this.foot = make("p", { className: "foot", hidden: true });
    const heading = title ? [make("h2", {}, this.heading, this.subtitle)] : [];
    this.element = make("section", { className: "lane" }, ...heading, this.answer, this.meters, this.foot);
    if (title) this.element.setAttribute("aria-label", title);
    this.record = []; // { at, text, rounds }, `at` in milliseconds since the request
    this.reset();
  }

  get title() {
    return this.heading.textContent;
  }

  reset() {
    this.rounds = [];
    this.text = "";
    this.firstAt = this.lastAt = 0;
    this.numTokens = 0;
    this.answer.replaceChildren();
    this.spark.replaceChildren();
    this.meters.hidden = true;
    for (const value of [this.length, this.budget, this.speed]) value.textContent = "–";
  }

  get tokensPerSecond() {
    return this.lastAt > this.firstAt ? ((this.numTokens - 1) * 1000) / (this.lastAt - this.firstAt) : 0;
  }

  get acceptanceLength() {
    const tokens = this.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    return this.rounds.length ? tokens / this.rounds.length : 0;
  }

  /** Show one piece: its text, of which the end is what its rounds brought. */
  show({ at, text, rounds }) {
    if (!text && !rounds.length) return;
    if (!this.numTokens) this.firstAt = at;
    this.lastAt = at;
    this.text += text;
    const pieces = rounds.map((round) => round.tokens.map((token) => token.text).join("")).join("");
    // The first token comes from reading the prompt and belongs to no round.
    const before = text.endsWith(pieces) ? text.slice(0, text.length - pieces.length) : text;
    if (before) this.answer.append(before);
    if (!this.numTokens) this.numTokens = 1;
    for (const round of rounds) {
      this.rounds.push(round);
      this.numTokens += round.tokens.length;
      if (text.endsWith(pieces)) this.answer.append(...this.chip(round));
      this.bar(round);
    }
    if (this.rounds.length) this.count();
  }

  /** A round's chip, behind the white space its text begins with: at the end of a line that would be a stub. */
  chip(round) {
    const chip = make("span", { className: "chip", tabIndex: this.answer.querySelector(".chip") ? -1 : 0 });
    chip.setAttribute("role", "button");
    chip.setAttribute("aria-haspopup", "dialog");
    chip.setAttribute("aria-description", `Round ${round.index + 1}: ${facts(round)}`);
    chip.dataset.length = Math.min(6, round.tokens.length);
    let before = "";
    for (const token of round.tokens) {
      const [, space, text] = /^(\s*)([^]*)$/.exec(token.text);
      if (chip.textContent) chip.append(space);
      else before += space;
      chip.append(token.is_bonus && text ? make("span", { className: "bonus" }, text) : text);
    }
    chip.round = round;
    if (chip.textContent) return [before, chip];
    chip.classList.add("is-blank");
    return [chip, before];
  }

  bar(round) {
    const height = Math.min(34, 3 + round.tokens.length * 4);
    const bar = draw("rect", { width: 3.6, height, y: 34 - height, rx: 1.2 });
    round.bar = bar;
    this.spark.append(bar);
    if (this.spark.childElementCount > SPARK_BARS) this.spark.firstChild.remove();
    [...this.spark.children].forEach((rect, index) => rect.setAttribute("x", index * 5));
    this.spark.setAttribute("width", this.spark.childElementCount * 5);
  }

  count() {
    this.meters.hidden = false;
    const budgets = this.rounds.reduce((sum, round) => sum + round.budget, 0) / this.rounds.length;
    this.length.textContent = this.acceptanceLength.toFixed(2);
    this.budget.textContent = budgets < 9.95 && budgets % 1 ? budgets.toFixed(1) : Math.round(budgets);
    const speed = this.tokensPerSecond;
    if (speed) this.speed.textContent = speed.toFixed(speed < 99.5 ? 1 : 0);
  }

  /** Ask, and show the answer as it arrives. Returns the finish reason. */
  async run(messages, method, seed, signal) {
    const start = performance.now();
    let reason = null;
    this.record = [];
    this.answer.classList.add("is-live");
    try {
      for await (const event of chat(messages, method, seed, signal)) {
        const choice = event.choices?.[0];
        const piece = {
          at: performance.now() - start,
          text: choice?.delta?.content ?? "",
          rounds: event.graft?.rounds ?? [],
        };
        this.record.push(piece);
        this.show(piece);
        stick();
        reason = choice?.finish_reason ?? reason;
        if (event.usage) this.usage = event.usage;
        // graft-<target>-<policy>, and "+refused" behind it while another policy was asked for.
        this.policy = /^graft-[^-]+-(.+?)(\+refused)?$/.exec(event.system_fingerprint ?? "")?.[1];
        if (event.metrics) this.metrics = event.metrics;
      }
      if (this.usage && this.rounds.length === 0) this.numTokens = this.usage.completion_tokens;
    } finally {
      this.answer.classList.remove("is-live");
    }
    const last = [...this.answer.querySelectorAll(".chip")].at(-1);
    if (last?.classList.contains("is-blank") && reason === "stop") last.classList.replace("is-blank", "is-end");
    this.tell(reason);
    return reason;
  }

  tell(reason) {
    const words = [plural(this.numTokens, "token")];
    if (this.rounds.length) words.push(plural(this.rounds.length, "round"));
    words.push(`first token after ${seconds(this.firstAt)}`);
    const graft = this.metrics?.graft;
    const policy = graft?.policy_version ? `v${graft.policy_version}` : this.policy;
    if (policy && !this.isPlain) words.push(`policy ${policy}`);
    // Without a learned policy the server draws its trees otherwise, and says how.
    if (policy && !this.isPlain && !/^(v\d|folder)/.test(policy)) this.heading.textContent = policy === "ddtree" ? "Draft trees" : policy;
    if (reason === "length") words.push("cut at the longest answer allowed");
    if (this.rounds.some((round) => round.batch_size > 1)) words.push("shared its rounds with other requests");
    this.foot.textContent = words.join(" · ");
    this.foot.hidden = false;
  }

  /** Show a recorded answer again, at the pace at which it came. */
  async replay(signal) {
    this.reset();
    this.answer.classList.add("is-live");
    const start = performance.now();
    for (const piece of this.record) {
      const left = piece.at - (performance.now() - start);
      if (left > 0 && !signal.aborted) await wait(left, signal);
      this.show(piece);
    }
    this.answer.classList.remove("is-live");
  }
}

// ---- The panel: one round and its tree

function facts(round) {
  const parts = [`${plural(round.tokens.length, "token")} from one pass`];
  parts.push(round.budget ? `${plural(round.budget, "node")} checked` : "nothing drafted");
  parts.push(milliseconds(round.round_ms));
  if (round.batch_size > 1) parts.push(`shared by ${round.batch_size} requests`);
  return parts.join(" · ");
}

/** A token's text so that it can be seen. */
function visible(text) {
  if (text === "") return "…";
  if (/^\s+$/.test(text)) return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  const shown = text.trim().replaceAll("\n", "⏎");
  return shown.length > 16 ? `${shown.slice(0, 15)}…` : shown;
}

const ROW = 26;
const PILL = 20;
const GAP = 30;
const ruler = document.createElement("canvas").getContext("2d");

/** The round's nodes, and the bonus token as one more node at the end of the accepted path. */
function treeNodes(round) {
  const { parents, depths, texts, accepted, elsewhere = [] } = round.tree;
  const kept = new Set(accepted);
  const marked = new Set(elsewhere);
  const nodes = texts.map((text, index) => ({
    text, parent: parents[index], depth: depths[index], children: [],
    kind: index === 0 ? "root" : kept.has(index) ? "accepted" : marked.has(index) ? "elsewhere" : "rejected",
  }));
  nodes.forEach((node, index) => { if (index) nodes[node.parent].children.push(node); });
  const bonus = round.tokens.find((token) => token.is_bonus);
  if (bonus) {
    const end = nodes[accepted.at(-1) ?? 0];
    const node = { text: bonus.text, depth: end.depth + 1, children: [], kind: "bonus-node" };
    end.children.unshift(node);
    nodes.push(node);
  }
  // What was kept runs straight on; what was not hangs below it.
  for (const node of nodes) node.children.sort((a, b) => isKept(b) - isKept(a));
  return nodes;
}

const isKept = (node) => node.kind === "accepted" || node.kind === "bonus-node";

function place(root) {
  let rows = 0;
  const visit = (node) => {
    node.row = rows;
    node.children.forEach((child, index) => { if (index) rows += 1; visit(child); });
  };
  visit(root);
  return rows + 1;
}

function drawTree(round) {
  const nodes = treeNodes(round);
  const rows = place(nodes[0]);
  ruler.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.text);
    node.width = Math.ceil(ruler.measureText(node.label).width) + 14;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 1));
  const [edges, keptEdges, pills] = [draw("g"), draw("g"), draw("g")]; // later ones lie above
  for (const node of nodes) {
    const x = starts[node.depth];
    const y = node.row * ROW + ROW / 2;
    const pill = draw("g", { class: node.kind, transform: `translate(${x} ${y})` },
      draw("rect", { x: 0.5, y: -PILL / 2, width: node.width, height: PILL, rx: 6 }),
      draw("text", { x: 7.5, y: 0.5 }, node.label));
    pill.append(draw("title", {}, JSON.stringify(node.text)));
    pills.append(pill);
    for (const child of node.children) {
      const from = x + node.width + 1;
      const to = starts[child.depth];
      const level = child.row * ROW + ROW / 2;
      const bend = Math.min(18, (to - from) / 2);
      const kind = { accepted: "accepted", "bonus-node": "bonus-edge" }[child.kind] ?? "";
      const curve = `M${from} ${y}H${to - 2 * bend}C${to - bend} ${y} ${to - bend} ${level} ${to} ${level}`;
      (isKept(child) ? keptEdges : edges).append(draw("path", { class: kind, d: curve }));
    }
  }
  const width = starts.at(-1) + widths.at(-1) + 2;
  const height = rows * ROW;
  const names = (kind) => nodes.filter((node) => node.kind === kind).map((node) => node.text).join("");
  const label = `Draft tree of ${plural(round.budget, "node")}. Accepted: ${JSON.stringify(names("accepted"))}. Bonus: ` +
    `${JSON.stringify(names("bonus-node"))}. Rejected: ${plural(round.budget - round.tree.accepted.length, "node")}.`;
  return draw("svg", { class: "tree", role: "img", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}` },
    edges, keptEdges, pills);
}

const panel = {
  chip: null,
  isPinned: false,
  timer: 0,

  open(chip, isPinned) {
    clearTimeout(this.timer);
    this.isPinned = isPinned;
    if (this.chip === chip) return;
    this.mark(false);
    this.chip = chip;
    this.mark(true);
    const { round } = chip;
    const { draft_ms, build_ms, verify_ms, commit_ms } = round.stages;
    $("panel-title").textContent = `Round ${round.index + 1}`;
    $("panel-facts").textContent = facts(round);
    $("panel-tree").replaceChildren(drawTree(round));
    $("panel-tree").scrollTo(0, 0);
    const bonus = round.tokens.find((token) => token.is_bonus);
    $("panel-note").hidden = !round.mismatch;
    $("panel-note").textContent = `“${visible(bonus?.text ?? "")}” was in the tree, but under another parent.`;
    $("panel-elsewhere").hidden = !round.mismatch;
    $("panel-stages").textContent = `draft ${draft_ms.toFixed(1)} · build ${build_ms.toFixed(1)} · ` +
      `verify ${verify_ms.toFixed(1)} · commit ${milliseconds(commit_ms)}`;
    $("panel").hidden = false;
    this.place();
  },

  /** Below the chip if there is room, above it otherwise, never outside the window. (On a phone CSS docks it.) */
  place() {
    const box = this.chip.getClientRects()[0];
    const { offsetWidth: width, offsetHeight: height } = $("panel");
    const below = box.bottom + 8 + height <= innerHeight - 8;
    const top = below ? box.bottom + 8 : Math.max(8, box.top - 8 - height);
    const left = Math.max(12, Math.min(box.left - 20, document.documentElement.clientWidth - width - 12));
    Object.assign($("panel").style, { top: `${top}px`, left: `${left}px` });
  },

  mark(isOpen) {
    this.chip?.classList.toggle("is-open", isOpen);
    this.chip?.round.bar?.classList.toggle("open", isOpen);
  },

  close() {
    clearTimeout(this.timer);
    const chip = this.chip;
    this.mark(false);
    this.chip = null;
    this.isPinned = false;
    if ($("panel").contains(document.activeElement)) chip?.focus();
    $("panel").hidden = true;
  },

  closeSoon() {
    clearTimeout(this.timer);
    if (!this.isPinned) this.timer = setTimeout(() => this.close(), 220);
  },
};

function chipOf(event) {
  const chip = event.target.closest?.(".chip[role=button]");
  return chip?.round ? chip : null;
}

const turns = $("turns");
let hoverTimer = 0;
turns.addEventListener("pointerover", (event) => {
  const chip = chipOf(event);
  clearTimeout(hoverTimer);
  if (!chip || event.pointerType !== "mouse" || panel.isPinned) return;
  hoverTimer = setTimeout(() => panel.open(chip, false), panel.chip ? 40 : 120);
});
turns.addEventListener("pointerout", (event) => {
  clearTimeout(hoverTimer);
  if (chipOf(event)) panel.closeSoon();
});
turns.addEventListener("click", (event) => {
  const chip = chipOf(event);
  if (!chip) return;
  if (panel.chip === chip && panel.isPinned) panel.close();
  else panel.open(chip, true);
});
turns.addEventListener("focusin", (event) => {
  const chip = chipOf(event);
  if (chip?.matches(":focus-visible")) panel.open(chip, false);
});
turns.addEventListener("focusout", (event) => {
  if (chipOf(event) && !$("panel").contains(event.relatedTarget)) panel.closeSoon();
});
turns.addEventListener("keydown", (event) => {
  const chip = chipOf(event);
  if (!chip) return;
  const chips = [...chip.closest(".answer").querySelectorAll(".chip")];
  const at = chips.indexOf(chip);
  const goal = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: chips.length - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    panel.open(chip, true);
    $("panel-tree").focus();
  } else if (chips[goal]) {
    event.preventDefault();
    chip.tabIndex = -1;
    chips[goal].tabIndex = 0;
    chips[goal].focus();
  }
});
$("panel").addEventListener("pointerenter", () => clearTimeout(panel.timer));
$("panel").addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") panel.closeSoon(); });
$("panel-close").addEventListener("click", () => panel.close());
document.addEventListener("pointerdown", (event) => {
  if (panel.chip && !$("panel").contains(event.target) && !chipOf(event)) panel.close();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && panel.chip) panel.close();
});
$("log").addEventListener("scroll", () => { if (panel.chip) panel.place(); }, { passive: true });
addEventListener("resize", () => { if (panel.chip) panel.place(); });

// ---- Turns

let messages = []; // the conversation, as the API wants it
let running = null; // AbortController of what is running

/** Keep the end in view while the reader is there. */
let isAtEnd = true;
const log = $("log");
log.addEventListener("scroll", () => { isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80; }, { passive: true });
function stick() {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (hadFocus) (controller ? $("stop") : $("prompt")).focus();
}

async function ask(text) {
  if (running || !text.trim()) return;
  const isRace = $("race").getAttribute("aria-checked") === "true";
  const conversation = [...messages, { role: "user", content: text }];
  const turn = make("article", { className: isRace ? "turn is-race" : "turn" },
    make("div", { className: "question" }, text));
  $("welcome").hidden = true;
  $("new-chat").hidden = false;
  turns.append(turn);
  panel.close();
  isAtEnd = true;
  const controller = new AbortController();
  setRunning(controller);
  announce("Answering.");
  try {
    const answer = await (isRace ? race : single)(turn, conversation, controller.signal);
    // Unless a new chat has begun meanwhile, which takes the turn off the page.
    if (turn.isConnected) messages = [...conversation, { role: "assistant", content: answer }];
  } catch (error) {
    fail(turn, text, error);
  } finally {
    setRunning(null);
    stick();
  }
}

async function single(turn, conversation, signal) {
  const lane = new Lane("");
  turn.append(make("div", { className: "lanes" }, lane.element));
  stick();
  await runLane(lane, conversation, null, newSeed(), signal);
  announce(`${lane.text} End of the answer: ${lane.foot.textContent}.`);
  return lane.text;
}

const newSeed = () => Math.floor(Math.random() * 2 ** 31);

/** Run a lane; one that was stopped keeps what it has. */
async function runLane(lane, conversation, method, seed, signal) {
  try {
    return await lane.run(conversation, method, seed, signal);
  } catch (error) {
    if (!signal.aborted) throw error;
    lane.foot.textContent = "Stopped.";
    lane.foot.hidden = false;
    return "stopped";
  }
}

/**
 * GRAFT, then plain decoding, each alone: side by side they would share the machine, and the ratio would mean nothing.
 * GRAFT goes first, so that whatever a first run costs is on its account.
 */
async function race(turn, conversation, signal) {
  const graft = new Lane("GRAFT");
  const plain = new Lane("Plain decoding", true);
  turn.append(make("div", { className: "lanes" }, graft.element, plain.element));
  graft.subtitle.textContent = "runs first, alone";
  plain.subtitle.textContent = "waits, so that each has the machine to itself";
  stick();
  const seed = newSeed();
  await runLane(graft, conversation, null, seed, signal);
  if (!signal.aborted) {
    graft.subtitle.textContent = "";
    plain.subtitle.textContent = "runs now, alone";
    await runLane(plain, conversation, "plain", seed, signal);
  }
  graft.subtitle.textContent = "";
  plain.subtitle.textContent = "";
  if (!signal.aborted) turn.append(verdict(graft, plain));
  announce(turn.querySelector(".verdict p")?.textContent ?? "Stopped.");
  return graft.text;
}

function verdict(graft, plain) {
  const isTimed = graft.tokensPerSecond > 0 && plain.tokensPerSecond > 0;
  const [winner, loser] = graft.tokensPerSecond >= plain.tokensPerSecond ? [graft, plain] : [plain, graft];
  const times = isTimed ? winner.tokensPerSecond / loser.tokensPerSecond : 1;
  if (isTimed) winner.element.classList.add("is-winner");
  let headline = "As fast as each other";
  if (!isTimed) headline = "Too short to compare";
  else if (times >= 1.05) headline = `${winner.title} was ${times.toFixed(2)} times as fast`;
  const texts = graft.text === plain.text
    ? "Both wrote the same text."
    : "The texts differ: in reduced precision two nearly equal tokens can fall either way; float32 gives the same text.";
  const shared = [...graft.rounds, ...plain.rounds].some((round) => round.batch_size > 1)
    ? " Other requests shared the machine meanwhile, so take the ratio with care." : "";
  const total = (lane) => seconds(lane.record.at(-1)?.at ?? 0);
  const again = make("button", { type: "button", className: "small" }, "Replay side by side");
  again.addEventListener("click", () => replay(graft, plain));
  return make("div", { className: "verdict" },
    make("p", {}, make("strong", {}, headline),
      ` ${winner.tokensPerSecond.toFixed(1)} against ${loser.tokensPerSecond.toFixed(1)} tokens/s, ${total(winner)} against ` +
      `${total(loser)} in all. ${texts}`,
      make("small", {}, `One after the other, each alone on the server as far as this page knows.${shared}`)),
    again);
}

async function replay(...lanes) {
  if (running) return;
  panel.close();
  const controller = new AbortController();
  setRunning(controller);
  await Promise.all(lanes.map((lane) => lane.replay(controller.signal)));
  setRunning(null);
}

/** Say what went wrong under the question, with a way on. */
function fail(turn, text, error) {
  const isOurs = error instanceof Problem;
  const message = isOurs ? error.message : `The page failed: ${error.message}.`;
  const again = make("button", { type: "button", className: "small" }, "Try again");
  again.addEventListener("click", () => {
    turn.remove();
    ask(text);
  });
  const box = make("div", { className: "problem" }, make("span", {}, message), again);
  box.setAttribute("role", "alert");
  turn.append(box);
  if (!turn.querySelector(".answer")?.textContent) turn.querySelector(".lanes")?.remove();
  if (error.status === 401) askForKey();
  if (!isOurs) console.error(error);
}

// ---- Controls

function askForKey() {
  $("key-form").hidden = false;
  $("key").focus();
}

function setKey(value) {
  settings.key = value.trim();
  $("key").value = "";
  $("settings-key").value = settings.key;
  $("key-form").hidden = true;
}

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey($("key").value);
  if (!(await loadModels())) return;
  const again = turns.querySelector(".turn:last-child .problem button");
  $("prompt").focus();
  again?.click();
});

async function loadModels() {
  try {
    const models = (await (await call("v1/models")).json()).data;
    $("model").replaceChildren(...models.map((model) => {
      const option = make("option", { value: model.id }, model.id);
      option.mayRace = model.graft?.methods?.includes("plain") ?? true;
      return option;
    }));
    $("model-row").hidden = models.length < 2;
    showModel();
    return true;
  } catch (error) {
    $("model-label").textContent = error.status === 401 ? "locked" : "not reachable";
    if (error.status === 401) askForKey();
    else announce(error.message);
    return false;
  }
}

function showModel() {
  $("model-label").textContent = settings.model;
  const mayRace = $("model").selectedOptions[0]?.mayRace ?? true;
  $("race").hidden = !mayRace;
  if (!mayRace) $("race").setAttribute("aria-checked", "false");
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

async function send() {
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  // The model's name may have been out of reach when the page was loaded.
  if (!settings.model) await loadModels();
  await ask(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("race").addEventListener("click", () => {
  $("race").setAttribute("aria-checked", String($("race").getAttribute("aria-checked") !== "true"));
});
$("new-chat").addEventListener("click", () => {
  running?.abort();
  panel.close();
  messages = [];
  turns.replaceChildren();
  $("welcome").hidden = false;
  $("new-chat").hidden = true;
  $("prompt").focus();
});
$("open-settings").addEventListener("click", () => {
  $("settings-key").value = settings.key;
  $("settings").showModal();
});
$("settings").addEventListener("close", () => {
  if ($("settings-key").value.trim() !== settings.key) {
    setKey($("settings-key").value);
    loadModels();
  }
  showModel();
});
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close();
});
$("temperature").addEventListener("input", () => { $("temperature-value").textContent = $("temperature").value; });

const EXAMPLES = [
  "Why is the sky blue? Explain it to a child.",
  "Write a Python function that returns the nth Fibonacci number.",
  "List the days of the week and one thing to do on each.",
  "A train leaves at 9:40 and takes 85 minutes. When does it arrive?",
];
for (const text of EXAMPLES) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", () => ask(text));
  $("examples").append(button);
}
loadModels();
$("prompt").focus({ preventScroll: true });
