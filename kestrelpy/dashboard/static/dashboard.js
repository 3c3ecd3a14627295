// The page of `kestrelpy dashboard`. Names and bytes are data: they go in as textContent, never as markup.
"use strict";

const REFRESH_MS = 2000, LINES_MS = 10000, ANSWER_MS = 10000, SAID_MS = 6000, TUBES_MS = 4000, DEAD_MS = 4000;
const byId = id => document.getElementById(id);
const state = {
  token: "", about: null, sort: "name", reverse: false, page: 0, pages: 1, filter: "", look: -1, linesAt: 0,
  rows: new Map(), totals: null, chosen: "", tubesAt: 0, deadAt: 0, since: 0, refreshing: false, again: false, tookMs: 0,
};
const COLUMNS = [
  ["name", "Queue"], ["items", "Items"], ["in", "In/s"], ["out", "Out/s"], ["", "In/s, last hour"],
  ["oldest", "Oldest"], ["lag", "Lag"], ["disk", "Disk"], ["trouble", "State"],
];

// -- words and numbers

const whole = number => Math.round(number).toLocaleString("en");
function short(number) {
  const size = Math.abs(number);
  if (size >= 1e9) return (number / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (number / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (number / 1e3).toPrecision(3) + "k";
  return size >= 100 || Number.isInteger(number) ? whole(number) : size >= 10 ? number.toFixed(1) : number.toFixed(2);
}
function bytes(size) {
  let value = size;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
}
function duration(seconds) {
  const passed = Math.max(0, seconds);
  if (passed < 60) return `${passed.toFixed(passed < 10 ? 1 : 0)} s`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ${Math.floor(passed % 60)} s`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ${Math.floor(passed % 3600 / 60)} min`;
  return `${Math.floor(passed / 86400)} d ${Math.floor(passed % 86400 / 3600)} h`;
}
function roughly(seconds) {
  if (seconds < 120) return `${Math.round(seconds * 10) / 10} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 360) / 10} h`;
}
const age = (sinceMs, nowMs) => sinceMs ? duration((nowMs - sinceMs) / 1000) : "–";
const clock = ms => new Date(ms).toLocaleString("sv");  // 2026-11-26 20:20:14, of this time zone
const timeOfDay = ms => new Date(ms).toLocaleTimeString("sv");

// -- elements

function element(name, {text, kind, ...attributes} = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}
function button(text, act, kind) {
  const made = element("button", {text, kind, type: "button"});
  made.addEventListener("click", act);
  return made;
}
function table(headings, rows, left = [0]) {
  const head = element("tr", {}, ...headings.map((text, at) => element("th", {text, scope: "col", kind: left.includes(at) ? "left" : ""})));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}
function show(place, isShown) { place.hidden = !isShown; }
let silence = 0;
function say(text) {
  setText(byId("said"), text);
  show(byId("said"), true);
  clearTimeout(silence);
  silence = setTimeout(() => show(byId("said"), false), SAID_MS);
}

// -- the server

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}
async function call(path, {query = {}, body} = {}) {
  const headers = {};
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  const options = {headers, credentials: "omit", cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS)};
  if (body !== undefined) {
    Object.assign(options, {method: "POST", body: JSON.stringify(body)});
    Object.assign(headers, {"X-Kestrelpy": "1", "Content-Type": "application/json"});
  }
  const words = new URLSearchParams(query).toString();
  const answer = await fetch(path + (words ? "?" + words : ""), options);
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let reason = text;
  try { reason = JSON.parse(text).error || text; } catch { /* it is plain text */ }
  throw new Refused(answer.status, reason);
}

// -- asking

// Takes the answer to the question that is open. A dialog's event "close" comes a moment later, when the next question may be open.
let settle = () => undefined;
function ask(text, label) {
  const input = byId("ask-input");
  setText(byId("ask-text"), text);
  show(input, Boolean(label));
  show(byId("ask-label"), Boolean(label));
  setText(byId("ask-label"), label || "");
  byId("ask").showModal();
  (label ? input : byId("ask-no")).focus();  // so that a second Enter changes nothing
  return new Promise(resolve => {
    settle = isYes => resolve(isYes ? Number(input.value) || 1 : null);
  });
}
function answered(isYes) {
  settle(isYes);
  byId("ask").close();
}
async function change(name, fields) {
  try {
    const changed = await call(`/api/change/${name}`, {body: fields});
    say(changed.said);
    return changed;
  } catch (error) {
    say(`Refused: ${error.message}`);
  } finally {
    refresh();
  }
}

// -- the table

function drawHead() {
  byId("head").replaceChildren(...COLUMNS.map(([key, title], at) => {
    const cell = element("th", {scope: "col", kind: at ? "" : "left"});
    if (!key) { cell.textContent = title; return cell; }
    const isSorted = state.sort === key;
    cell.append(button(title + (isSorted ? (goesUp(key) ? " ▲" : " ▼") : ""), () => sortBy(key), "plain"));
    if (isSorted) cell.setAttribute("aria-sort", goesUp(key) ? "ascending" : "descending");
    return cell;
  }));
}
const goesUp = key => (key === "name") !== state.reverse;  // all but names begin with the largest
function sortBy(key) {
  state.reverse = state.sort === key && !state.reverse;
  Object.assign(state, {sort: key, page: 0, look: -1, linesAt: 0});
  drawHead();
  const sorted = [...byId("head").querySelectorAll("button")][COLUMNS.filter(one => one[0]).findIndex(one => one[0] === key)];
  sorted.focus();
  refresh();
}
function newRow(name) {
  const open = button(name, () => choose(name), "plain name");
  const cells = COLUMNS.map((_, at) => element(at ? "td" : "th", at ? {} : {scope: "row", kind: "left"}));
  cells[0].append(open);
  const tag = element("span", {kind: "tag"});
  cells[8].append(tag);
  return {row: element("tr", {}, ...cells), cells, tag};
}
function fillRow(made, one, nowMs) {
  const {cells, tag} = made, isItems = one.kind === "queue";
  setText(cells[1], isItems ? whole(one.items) : "–");
  setText(cells[2], short(one.in));
  setText(cells[3], short(one.out));
  setText(cells[5], age(one.oldest_ms, nowMs));
  setText(cells[6], (one.estimated ? "~" : "") + bytes(one.bytes));
  setText(cells[7], bytes(one.disk));
  setText(tag, one.problem ? "in trouble" : one.pending ? aboutPending(one) : isItems ? "fine" : one.kind);
  tag.classList.toggle("bad", Boolean(one.problem));
  tag.title = one.problem;
  if (one.line) cells[4].replaceChildren(Charts.spark(one.line, `${one.name}: items put in a second, last hour`));
  made.row.classList.toggle("chosen", one.name === state.chosen);
}
const aboutPending = one => `${whole(one.pending)} ${one.pending === 1 ? "batch" : "batches"} pending${one.exists ? "" : ", no owner yet"}`;
function drawTable(answer) {
  const rows = new Map();
  for (const one of answer.rows) {
    const made = state.rows.get(one.name) || newRow(one.name);
    fillRow(made, one, answer.now_ms);
    rows.set(one.name, made);
  }
  const body = byId("rows"), before = [...body.children], after = [...rows.values()].map(made => made.row);
  if (before.length !== after.length || before.some((row, at) => row !== after[at])) {
    const focused = document.activeElement;
    body.replaceChildren(...after);
    if (body.contains(focused)) focused.focus();  // a row that has moved keeps the focus
  }
  state.rows = rows;
  Object.assign(state, {page: answer.page, pages: answer.pages});
  setText(byId("matching"), `${whole(answer.matching)} of ${whole(answer.names)}`);
  setText(byId("page"), `page ${answer.page + 1} of ${answer.pages}`);
  byId("previous").disabled = answer.page === 0;
  byId("next").disabled = answer.page + 1 >= answer.pages;
  show(byId("pager"), answer.pages > 1);
}
const CARDS = [
  ["Queues", t => whole(t.queues)], ["Unread items", t => short(t.items)], ["In a second", t => short(t.in)],
  ["Out a second", t => short(t.out)], ["Oldest item", (t, now) => age(t.oldest_ms, now)], ["On disk", t => bytes(t.disk)],
  ["In trouble", t => whole(t.troubles)],
];
function drawCards(totals, nowMs) {
  const place = byId("cards");
  if (!place.children.length) {
    place.append(...CARDS.map(([title]) => element("div", {}, element("dt", {text: title}), element("dd"))));
  }
  CARDS.forEach(([, figure], at) => setText(place.children[at].lastChild, figure(totals, nowMs)));
  place.lastChild.classList.toggle("alarm", totals.troubles > 0);
}

// -- lines: what is known of an hour, of which the server sends the newest points

class Hour {
  constructor() { this.last = 0; this.kept = {}; this.lag = {}; }
  take(lines) {
    const last = lines.first + lines.in.length - 1;
    for (const name of ["in", "out", "items", "oldest"]) this.kept[name] = this.joined(this.kept[name], lines[name], lines);
    const lag = {};
    for (const [reader, points] of Object.entries(lines.lag)) lag[reader] = this.joined(this.lag[reader], points, lines);
    this.lag = lag;
    Object.assign(this, {last, slots: lines.slots, slotSeconds: lines.slot_seconds});
  }
  joined(before, points, lines) {
    const whole = (before || []).slice();
    const first = this.last + 1 - whole.length;  // the slot of whole[0]
    whole.length = Math.max(0, Math.min(whole.length, lines.first - first));
    while (whole.length < lines.slots - points.length) whole.unshift(null);
    return whole.concat(points).slice(-lines.slots);
  }
  get after() { return Math.max(0, this.last - 1); }  // the newest point is not done yet
}
let totalHour = new Hour(), queueHour = new Hour();
function drawTotals(lines) {
  totalHour.take(lines);
  const about = {lastMs: (totalHour.last + 1) * lines.slot_seconds * 1000, slotSeconds: lines.slot_seconds, unit: "items a second", format: short};
  Charts.draw(byId("total-chart"), [{name: "in", points: totalHour.kept.in}, {name: "out", points: totalHour.kept.out}], about);
}

// -- one queue

function choose(name) {
  Object.assign(state, {chosen: name, tubesAt: 0, deadAt: 0});
  queueHour = new Hour();
  for (const [other, made] of state.rows) made.row.classList.toggle("chosen", other === name);
  for (const id of ["readers", "tubes", "dead-origins", "dead", "newest", "facts", "rate-chart", "lag-chart", "oldest-chart"]) byId(id).replaceChildren();
  for (const id of ["verify-result", "detail-problem", "tubes-panel", "dead-panel"]) show(byId(id), false);
  show(byId("detail"), Boolean(name));
  show(byId("newest-panel"), Boolean(name) && state.about.show_data);
  if (!name) return;
  setText(byId("detail-title"), name);
  byId("detail").focus({preventScroll: true});
  byId("detail").scrollIntoView({block: "start"});
  refresh();
  if (state.about.show_data) lookAtNewest();
}
function drawQueue(one) {
  setText(byId("detail-kind"), one.exists ? one.kind : "no queue yet");
  show(byId("verify"), one.exists);
  show(byId("detail-problem"), Boolean(one.problem));
  setText(byId("detail-problem"), one.problem);
  const isItems = one.kind === "queue";
  const facts = [
    [isItems ? "Unread items" : "Records kept", whole(one.items)], ["Lag", bytes(one.bytes)], ["Ever put", `${whole(one.put_items)}, ${bytes(one.put_bytes)}`],
    ["Last id", whole(one.last_id)], ["Oldest", one.oldest_ms ? `${age(one.oldest_ms, one.now_ms)}, since ${clock(one.oldest_ms)}` : "–"],
    ["Segments", whole(one.segments)], ["On disk", bytes(one.disk)], ...(one.pending ? [["In the inbox", aboutPending(one)]] : []),
  ];
  byId("facts").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", {text: name}), element("dd", {text})]));
  setText(byId("lag-title"), isItems ? "Lag: unread items by reader" : "Records kept");
  if (one.lines) drawLines(one.lines, isItems);
  show(byId("readers-panel"), isItems);
  if (isItems) drawReaders(one);
}
function drawLines(lines, isItems) {
  queueHour.take(lines);
  const about = {lastMs: (queueHour.last + 1) * lines.slot_seconds * 1000, slotSeconds: lines.slot_seconds};
  Charts.draw(byId("rate-chart"), [{name: "in", points: queueHour.kept.in}, {name: "out", points: queueHour.kept.out}], {...about, unit: "items a second", format: short});
  const lags = Object.entries(queueHour.lag).map(([reader, points]) => ({name: reader || "default", points}));
  const all = [{name: isItems ? "items" : "records", points: queueHour.kept.items}];
  Charts.draw(byId("lag-chart"), isItems && lags.length ? lags : all, {...about, unit: all[0].name, format: short});
  Charts.draw(byId("oldest-chart"), [{name: "age", points: queueHour.kept.oldest}], {...about, unit: "seconds", format: duration, onAxis: roughly});
}
function drawReaders(one) {
  const mayDrop = state.about.changes.includes("drop-reader");
  const rows = one.readers.map(reader => {
    const cells = [whole(reader.items), short(reader.rate), age(reader.oldest_ms, one.now_ms), bytes(reader.bytes), whole(reader.head)];
    const row = element("tr", {}, element("th", {text: reader.name || "(default)", scope: "row", kind: "left"}), ...cells.map(text => element("td", {text})));
    if (mayDrop) {
      const cell = element("td");
      if (reader.name) cell.append(button("Drop…", () => dropReader(one.name, reader.name)));
      row.append(cell);
    }
    return row;
  });
  const headings = ["Reader", "Unread", "Out/s", "Oldest", "Lag", "Head", ...(mayDrop ? [""] : [])];
  redraw(byId("readers"), table(headings, rows));
  if (one.reader_count > one.readers.length) byId("readers").append(element("p", {text: `and ${whole(one.reader_count - one.readers.length)} more`}));
}
// Replaces a table, but not while one of its buttons has the focus.
function redraw(place, made) {
  if (!place.contains(document.activeElement)) place.replaceChildren(made);
}
async function dropReader(queue, reader) {
  if (await ask(`Drop reader ${reader} of ${queue}? Its position is forgotten, and segments that only it needs are deleted.`) !== null) {
    await change("drop-reader", {queue, reader});
  }
}
async function lookAtTubes(queue) {
  if (Date.now() - state.tubesAt < TUBES_MS) return;
  state.tubesAt = Date.now();
  const {tubes, tube_count: count, reason} = await call("/api/tubes", {query: {name: queue}});
  if (queue !== state.chosen) return;
  setText(byId("tubes-note"), reason || "Reserved jobs are among the ready ones.");
  const mayKick = state.about.changes.includes("kick");
  const rows = tubes.map(tube => {
    const paused = tube.paused_until_ms ? `until ${clock(tube.paused_until_ms)}` : "";
    const cells = [whole(tube.ready), whole(tube.delayed), whole(tube.buried), bytes(tube.bytes), age(tube.oldest_ms, Date.now()), paused];
    const row = element("tr", {}, element("th", {text: tube.name, scope: "row", kind: "left"}), ...cells.map(text => element("td", {text})));
    if (mayKick) row.append(element("td", {}, button("Kick…", () => kick(queue, tube))));
    return row;
  });
  redraw(byId("tubes"), table(["Tube", "Ready", "Delayed", "Buried", "Bytes", "Oldest", "Paused", ...(mayKick ? [""] : [])], rows));
  if (count > tubes.length) byId("tubes").append(element("p", {text: `and ${whole(count - tubes.length)} more`}));
  show(byId("tubes-panel"), true);
}
async function kick(queue, tube) {
  byId("ask-input").value = Math.max(1, tube.buried || tube.delayed);
  const count = await ask(`Make ${tube.buried ? "buried" : "delayed"} jobs of tube ${tube.name} ready?`, "At most so many");
  if (count !== null) await change("kick", {queue, tube: tube.name, count});
}
const origin = one => one.reader ? `${one.queue}, reader ${one.reader}` : one.queue;
function aboutWaiting(name, count) {
  const [wait, them] = count === 1 ? ["batch waits", "it"] : ["batches wait", "them"];
  return `${whole(count)} published ${wait} for ${name}: its owner, or whoever opens it next, takes ${them} in.`;
}
function aboutBoxes(boxes) {
  const words = boxes.flatMap(box => [
    box.waiting ? aboutWaiting(box.name, box.waiting) : "",
    box.others ? `${box.name} has ${whole(box.others)} items that are no dead letters.` : "",
    box.is_whole ? "" : `${box.name} has more: not all are counted yet.`,
  ]);
  return words.filter(Boolean).join(" ");
}
async function lookAtDead(queue) {
  if (Date.now() - state.deadAt < DEAD_MS) return;
  state.deadAt = Date.now();
  let found;
  try {
    found = await call("/api/dead", {query: {name: queue}});
  } catch (error) {
    if (!(error instanceof Refused) || error.status === 401) throw error;
    found = {boxes: [], origins: [], origin_count: 0, letters: [], reason: error.message};
  }
  if (queue !== state.chosen) return;
  const {boxes, origins, origin_count: count, letters, reason} = found;
  show(byId("dead-panel"), Boolean(boxes.length || reason));
  setText(byId("dead-note"), reason || aboutBoxes(boxes));
  const mayRequeue = state.about.changes.includes("requeue"), last = mayRequeue ? [""] : [];
  const from = origins.map(one => {
    const row = element("tr", {}, element("th", {text: origin(one), scope: "row", kind: "left"}), element("td", {text: one.box, kind: "left"}), element("td", {text: whole(one.count)}));
    if (mayRequeue) row.append(element("td", {}, button("Requeue all…", () => requeue(one))));
    return row;
  });
  redraw(byId("dead-origins"), table(["Given up by", "Kept in", "Letters", ...last], from, [0, 1]));
  if (count > origins.length) byId("dead-origins").append(element("p", {text: `and ${whole(count - origins.length)} more`}));
  const hasData = state.about.show_data;
  const rows = letters.map(one => {
    const cells = [whole(one.item), clock(one.died_ms), whole(one.errors), bytes(one.bytes)].map(text => element("td", {text}));
    const shown = hasData ? [element("td", {text: one.about, kind: "text"}), element("td", {text: one.head + (one.bytes > 200 ? " …" : ""), kind: "text"})] : [];
    const row = element("tr", {}, element("th", {text: origin(one), scope: "row", kind: "left"}), ...cells, ...shown);
    if (mayRequeue) row.append(element("td", {}, button("Requeue…", () => requeue(one, one.id))));
    return row;
  });
  const headings = ["The newest", "Item", "Died", "Errors", "Size", ...(hasData ? ["Reason", "Beginning"] : []), ...last];
  redraw(byId("dead"), letters.length ? table(headings, rows, [0, ...(hasData ? [5, 6] : [])]) : element("p"));
}
async function requeue(one, id) {
  const chosen = state.chosen, what = id === undefined ? `all ${whole(one.count)} dead letters of ${origin(one)}` : `item ${whole(one.item)}, given up by ${origin(one)},`;
  if (await ask(`Put ${what} back into ${one.queue}? All its readers get the data as new items.`) === null) return;
  const fields = {queue: one.box, keeper: one.keeper, from_queue: one.queue, from_reader: one.reader, ...(id === undefined ? {} : {id})};
  let changed;
  do {
    byId("detail").focus({preventScroll: true});  // no button keeps the tables from being drawn again
    state.deadAt = 0;
    changed = await change("requeue", fields);
  } while (changed && changed.more && chosen === state.chosen);
}
async function lookAtNewest() {
  const queue = state.chosen;
  try {
    const {items, reason} = await call("/api/newest", {query: {name: queue}});
    if (queue !== state.chosen) return;
    const rows = items.map(item => {
      const text = item.head + (item.bytes > 200 ? " …" : "");
      const cells = [whole(item.id), clock(item.added_ms), bytes(item.bytes), ...(items.some(each => each.about) ? [item.about] : [])];
      return element("tr", {}, ...cells.map(each => element("td", {text: each})), element("td", {text, kind: "text"}));
    });
    const headings = ["Id", "Put", "Size", ...(items.some(each => each.about) ? ["Tube"] : []), "Beginning"];
    byId("newest").replaceChildren(items.length ? table(headings, rows, [headings.length - 1]) : element("p", {text: reason || "There is none."}));
  } catch (error) {
    byId("newest").replaceChildren(element("p", {text: error.message, kind: "problem"}));
  }
}

// -- checks

async function verify() {
  try {
    await call("/api/verify", {body: {queue: state.chosen}});
  } catch (error) {
    say(error.message);
  }
  lookAtChecks();
}
async function lookAtChecks() {
  const {running, results} = await call("/api/verify");
  byId("verify").disabled = Boolean(running);
  const result = results.find(one => one.queue === state.chosen), place = byId("verify-result");
  show(place, running === state.chosen || Boolean(result));
  place.className = "";
  if (running === state.chosen) {
    setText(place, "Checking every byte…");
  } else if (result) {
    place.className = result.ok ? "good" : "bad";
    setText(place, checked(result));
  }
  if (running) setTimeout(() => lookAtChecks().catch(() => undefined), 500);
}
function checked(result) {
  const when = `Checked at ${clock(result.at_ms)} in ${duration(result.seconds)}: `;
  if (result.error) return when + result.error;
  const read = `${whole(result.items)} items in ${whole(result.segments)} segments, `;
  if (result.ok) return when + read + "no damage.";
  return when + read + `damaged in ${whole(result.damages)} places. ` + result.damage.map(d => `${d.path}, offset ${whole(d.offset)}: ${d.reason}`).join("; ");
}

// -- refreshing

async function refresh() {
  if (state.refreshing) { state.again = true; return; }
  state.refreshing = true;
  try {
    await refreshOnce();
    await (state.again ? (state.again = false, refreshOnce()) : undefined);
    alive();
  } catch (error) {
    failed(error);
  } finally {
    state.refreshing = state.again = false;
  }
}
async function refreshOnce() {
  const began = performance.now();
  const wantsLines = Date.now() - state.linesAt >= LINES_MS;
  const query = {sort: state.sort, reverse: state.reverse ? 1 : 0, page: state.page, filter: state.filter};
  const answer = await call("/api/queues", {query: {...query, ...(wantsLines ? {lines: 1, after: totalHour.after} : {seen: state.look})}});
  state.look = answer.look;
  if (!answer.unchanged) {
    drawTable(answer);
    drawCards(answer.totals, answer.now_ms);
    const problem = answer.problem ? `The folder cannot be looked at: ${answer.problem}`
      : answer.inbox_problem ? `What is pending is not known, the inbox cannot be read: ${answer.inbox_problem}` : "";
    show(byId("banner"), Boolean(problem));
    if (problem) setText(byId("banner"), problem);
    if (answer.lines) { drawTotals(answer.lines); state.linesAt = Date.now(); }
  }
  if (state.chosen) await refreshQueue(state.chosen);
  state.tookMs = performance.now() - began;
}
async function refreshQueue(name) {
  try {
    const one = await call("/api/queue", {query: {name, after: queueHour.after}});
    if (name !== state.chosen) return;
    drawQueue(one);
    if (one.kind !== "queue") await lookAtTubes(name); else await lookAtDead(name);
  } catch (error) {
    if (!(error instanceof Refused) || error.status === 401) throw error;
    show(byId("detail-problem"), true);
    setText(byId("detail-problem"), error.message);
  }
}
function alive() {
  if (state.since) byId("banner").hidden = true;
  state.since = 0;
  byId("dot").className = "dot good";
  setText(byId("state"), `as of ${timeOfDay(Date.now())}`);
}
function failed(error) {
  byId("dot").className = "dot bad";
  if (error instanceof Refused && error.status === 401) {
    setText(byId("state"), "a token is needed");
    show(byId("token-form"), true);
    show(byId("main"), false);
    return;
  }
  state.since = state.since || Date.now();
  setText(byId("state"), "not connected");
  const why = error instanceof Refused ? error.message : "the server does not answer";
  setText(byId("banner"), `Since ${timeOfDay(state.since)}: ${why}. The figures are from before; trying again.`);
  show(byId("banner"), true);
}
async function begin() {
  try {
    state.about = await call("/api/about");
  } catch (error) {
    failed(error);
    return false;
  }
  setText(byId("folder"), state.about.directory);
  show(byId("token-form"), false);
  show(byId("main"), true);
  await refresh();
  return true;
}
async function tick() {
  if (!document.hidden && byId("token-form").hidden) {
    if (state.about) await refresh(); else await begin();
  }
  setTimeout(tick, REFRESH_MS);
}

// -- the page

function wire() {
  const inHash = location.hash.match(/^#token=(.+)$/);
  if (inHash) {
    state.token = decodeURIComponent(inHash[1]);
    history.replaceState(null, "", location.pathname);  // it stays in no bookmark and in no list of visited pages
  }
  drawHead();
  byId("token-form").addEventListener("submit", event => {
    event.preventDefault();
    state.token = byId("token").value.trim();
    byId("token").value = "";
    show(byId("token-form"), false);
    begin();
  });
  byId("filter").addEventListener("input", event => {
    Object.assign(state, {filter: event.target.value, page: 0, look: -1, linesAt: 0});
    refresh();
  });
  const turn = by => { Object.assign(state, {page: state.page + by, look: -1, linesAt: 0}); refresh(); };
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  byId("close").addEventListener("click", () => { choose(""); byId("queues").focus(); });
  byId("verify").addEventListener("click", verify);
  byId("newest-again").addEventListener("click", lookAtNewest);
  byId("ask-yes").addEventListener("click", () => answered(true));
  byId("ask-no").addEventListener("click", () => answered(false));
  byId("ask").addEventListener("close", () => { if (!byId("ask").open) settle(false); });  // by Escape
  document.addEventListener("visibilitychange", () => { if (!document.hidden && state.about) refresh(); });
  window.addEventListener("resize", () => { state.linesAt = 0; });
  tick();
}
wire();
