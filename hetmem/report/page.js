// Puts the report into the page: numbers, charts, zoom, hover, theme. All names are set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const frame = { charts: [], axis: null, milliseconds: 0, requested: false };
window.hetmemReport = frame; // for tests and the curious

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const FORMATS = {
  bytes: formatBytes, seconds: formatSeconds, share: formatShare, count: (value) => Math.round(value).toLocaleString("en-US"),
  plain: (value) => value.toFixed(2),
};

/** Make `node` show the number at `key` of the report, and record `key` on it. */
function shows(node, key, format) {
  const value = key.split(".").reduce((part, name) => part?.[name], data);
  node.dataset.key = key;
  node.dataset.format = format;
  node.textContent = FORMATS[format](value);
  return node;
}

// ---- head -----------------------------------------------------------------------------------------------------------
function fillHead() {
  document.title = `${data.model}: hetmem report`;
  byId("model").textContent = data.model;
  const facts = byId("facts");
  facts.append(shows(element("span"), "parameters", "count"), " parameters, ", shows(element("span"), "chunks", "count"),
    data.chunks === 1 ? " chunk of " : " chunks of ", shows(element("span"), "chunk_bytes", "bytes"), ", ", shows(element("span"), "steps", "count"),
    `${data.steps === 1 ? " step" : " steps"}; ${data.created_at.slice(0, 16).replace("T", " ")} UTC`);
  for (const sentence of data.missing) byId("missing").append(element("li", "", sentence));
}

const TERMS = {
  compute: "Compute", launching: "Launching", host_to_device: "Host to device", device_to_host: "Device to host",
  host_optimizer: "Host optimizer", nvme_read: "NVMe read", nvme_write: "NVMe write",
};

/** Whether `name` is of NVMe and the budget has none. */
const unused = (name) => name.startsWith("nvme") && !data.tiers.nvme.capacity_bytes;

function fillVerdict() {
  const step = data.step;
  if (!step) return;
  byId("verdict").hidden = false;
  const [first] = step.sentence.split(":");
  byId("sentence").append(element("b", "", first), step.sentence.slice(first.length));
  if (data.activations) byId("activations").textContent = data.activations.sentence;
  for (const term of Object.keys(step.terms).filter((name) => !unused(name) && (step.of === "step" || step.terms[name]))) {
    const binds = term === step.binding ? " binds" : "";
    const track = element("div", "track"), fill = element("div", "fill");
    fill.style.width = `${Math.min(100, (step.terms[term] / step.seconds) * 100)}%`;
    track.append(fill);
    const row = element("div", `term${binds}`);
    row.append(element("span", "name", TERMS[term]), track,
      shows(element("span", "figure"), `step.terms.${term}`, "seconds"),
      element("span", "figure quiet", formatShare(step.terms[term] / step.seconds)));
    byId("terms").append(row);
  }
  byId("terms").append(element("p", "total quiet", `The full width is the whole ${step.of}. No ${step.of} can be shorter than its longest term.`));
}

function fillNumbers() {
  const step = data.step, tiers = data.tiers;
  const inSegments = (step) => Object.entries(step.moments_by_segment ?? {}).map(([name, count]) => `, ${name} ${count.toLocaleString("en-US")}`).join("");
  const ofBudget = (tier) => (tier.capacity_bytes ? `${formatShare(tier.peak_bytes / tier.capacity_bytes)} of ${formatBytes(tier.capacity_bytes)}` : "no budget");
  const stepNumbers = !step ? [] : [
    [step.of === "step" ? "Step time" : "Forward time", "step.seconds", "seconds", `${step.moments.toLocaleString("en-US")} moments${inSegments(step)}`],
    ...(step.tokens ? [["Tokens a second", "step.tokens_per_second", "count", `${step.tokens.toLocaleString("en-US")} in the ${step.of}`]] : []),
    ["Overlap", "step.overlap", "share", `longest term / ${step.of} time`],
    [`Stalled in the ${step.of}`, "step.stall_seconds", "seconds", `${formatShare(step.stall_seconds / step.seconds)} of it`],
    ...("launching" in step.terms ? [[`Host waits in the ${step.of}`, "step.host_wait_seconds", "seconds", "the training thread"]] : []), // else its stalls
    [`Faults in the ${step.of}`, "step.faults", "count", "uses that found no copy in flight"],
  ];
  const numbers = [
    ...stepNumbers,
    ["Device peak", "tiers.device.peak_bytes", "bytes", ofBudget(tiers.device)],
    ["Host peak", "tiers.host.peak_bytes", "bytes", ofBudget(tiers.host)],
    ...(unused("nvme") ? [] : [["NVMe peak", "tiers.nvme.peak_bytes", "bytes", ofBudget(tiers.nvme)]]),
    ["Bytes per parameter", "bytes_per_parameter", "plain", "homes on all tiers"],
    ["Chunk waste", "chunk_waste", "share", "of the bytes of chunks"],
    ...(step && !unused("nvme") ? [["Written to NVMe a day", "step.nvme_written_bytes_per_day", "bytes", "at this pace, without a pause"]] : []),
  ];
  for (const [name, key, format, note] of numbers) {
    const tile = element("div");
    tile.append(element("dt", "", name), shows(element("dd"), key, format), element("dd", "", note));
    byId("numbers").append(tile);
  }
}

// ---- history --------------------------------------------------------------------------------------------------------
const MOST_BARS = 120;

/** One bar for each step, or for the longest of some neighbours; its stalls are red. */
function fillHistory() {
  const { of, seconds, stall_seconds: stalls, tokens } = data.history;
  if (seconds.length < 2) return;
  byId("history").hidden = false;
  const longest = Math.max(...seconds), sorted = [...seconds].sort((a, b) => a - b);
  const median = sorted[sorted.length >> 1], every = Math.ceil(seconds.length / MOST_BARS);
  byId("history").querySelector("h2").textContent = `The last ${seconds.length} ${of}s`;
  for (let first = 0; first < seconds.length; first += every) {
    const group = [...Array(Math.min(every, seconds.length - first)).keys()].map((offset) => first + offset);
    const index = group.reduce((best, other) => (seconds[other] > seconds[best] ? other : best));
    const bar = element("div"), stalled = element("i");
    bar.style.height = `${(seconds[index] / longest) * 100}%`;
    stalled.style.height = `${Math.min(1, stalls[index] / seconds[index]) * 100}%`;
    const speed = tokens[index] ? `, ${Math.round(tokens[index] / seconds[index]).toLocaleString("en-US")} tokens/s` : "";
    bar.title = `${of} ${index + 1} of ${seconds.length}: ${formatSeconds(seconds[index])}, stalled ${formatSeconds(stalls[index])}${speed}`;
    bar.append(stalled);
    byId("bars").append(bar);
  }
  const said = `${formatSeconds(sorted[0])} to ${formatSeconds(longest)}, median ${formatSeconds(median)}`;
  byId("bars").setAttribute("aria-label", `Seconds of the last ${seconds.length} ${of}s: ${said}`);
  byId("history").querySelector("p").textContent = `${said}; stalls are red.${every > 1 ? ` Each bar is the longest of ${every}.` : ""}`;
}

// ---- what was planned -------------------------------------------------------------------------------------------------
const TIER_PEAKS = { device: "Device peak", host: "Host peak", nvme: "NVMe peak" };

function fillPlanned() {
  const planned = data.planned, at = (key) => key.split(".").reduce((part, name) => part?.[name], data);
  if (!planned) return;
  byId("planned").hidden = false;
  const batches = planned.micro_batches === 1 ? "" : `${planned.micro_batches} micro-batches of `;
  byId("planned-for").textContent = `Planned for ${planned.hardware}, ${batches}${planned.rows} ${planned.rows === 1 ? "row" : "rows"} a step.`;
  const pairs = [
    ["Step time", "planned.step_seconds", "step.seconds", "seconds"],
    ...Object.keys(TERMS).map((term) => [TERMS[term], `planned.terms.${term}`, `step.terms.${term}`, "seconds"]),
    ...Object.keys(TIER_PEAKS).map((tier) => [TIER_PEAKS[tier], `planned.peak_bytes.${tier}`, `tiers.${tier}.peak_bytes`, "bytes"]),
  ].filter(([, expected, seen]) => !expected.endsWith(".launching") && (at(expected) || at(seen)));
  fillTable(byId("plan"), ["", "Planned", "This run", "Plan is off by"], pairs.map(([name, expected, seen, format]) => [
    element("td", "", name), at(expected) === undefined ? element("td", "", "–") : shows(element("td"), expected, format),
    at(seen) === undefined ? element("td", "", "–") : shows(element("td"), seen, format),
    element("td", "", at(seen) ? `${at(expected) < at(seen) ? "−" : "+"}${formatShare(Math.abs(at(expected) / at(seen) - 1))}` : ""),
  ]));
}

// ---- tables ---------------------------------------------------------------------------------------------------------
function fillTable(table, heads, rows) {
  const head = table.createTHead().insertRow(), body = table.createTBody();
  heads.forEach((text) => head.append(element("th", ["Parameters", "Module"].includes(text) ? "names" : "", text)));
  for (const cells of rows) body.insertRow().append(...cells);
}

function fillLinks() {
  const saved = data.activations?.bytes;
  fillTable(byId("links"), ["Link", "Moved", "Busy", "Rate", ...(saved ? ["Activations, last step"] : [])], Object.entries(data.links).filter(([name]) => !unused(name)).map(([name, link]) => [
    element("td", "", TERMS[name]), shows(element("td"), `links.${name}.bytes`, "bytes"),
    shows(element("td"), `links.${name}.seconds`, "seconds"),
    element("td", "", link.seconds ? `${formatBytes(link.bytes / link.seconds)}/s` : "–"),
    ...(saved ? [shows(element("td"), `activations.bytes.${name}`, "bytes")] : []),
  ]));
}

/** The largest kinds of tensors beside chunks; on a phone the module has a line of its own. */
function fillBeside() {
  const found = data.beside_chunks;
  if (!found) return;
  byId("beside").hidden = false;
  byId("beside").querySelector("p").textContent = found.sentence;
  const rows = found.tensors.map((each, index) => [
    element("td", "", each.operator), element("td", "", each.held), shows(element("td"), `beside_chunks.tensors.${index}.count`, "count"),
    shows(element("td"), `beside_chunks.tensors.${index}.bytes`, "bytes"), named([each.module]),
  ]);
  rows.push([element("td", "", "others"), ...["", ""].map((text) => element("td", "", text)),
    shows(element("td"), "beside_chunks.other_bytes", "bytes"), named([""])]);
  fillTable(byId("tensors"), ["Operator", "Held as", "Tensors", "Bytes", "Module"], rows);
}

function fillWaits() {
  const blocks = (data.timeline?.blocks ?? []).map((facts, index) => [facts, index]);
  const waited = blocks.filter(([facts]) => facts.stall_seconds > 0).sort((a, b) => b[0].stall_seconds - a[0].stall_seconds);
  if (!waited.length) return;
  byId("waits").hidden = false;
  fillTable(byId("chunks"), ["Chunk", "Waited", "Fetched", "Home", "Parameters"], waited.slice(0, 10).map(([facts, index]) => [
    element("td", "", `${facts.chunk}`), shows(element("td"), `timeline.blocks.${index}.stall_seconds`, "seconds"),
    shows(element("td"), `timeline.blocks.${index}.fetched_bytes`, "bytes"),
    element("td", "", facts.home), named(facts.parameters),
  ]));
}

/** A cell with names: at most three lines, and the end of a long name; the tooltip has all of them. */
function named(names) {
  const cell = element("td", "names");
  const lines = element("div", "", names.map((name) => (name.length > 80 ? `…${name.slice(-79)}` : name)).join(", "));
  lines.title = names.join(", ");
  cell.append(lines);
  return cell;
}

// ---- charts ---------------------------------------------------------------------------------------------------------
function makeCharts() {
  const timeline = data.timeline;
  if (!timeline) return;
  byId("timeline").hidden = false;
  byId("covers").textContent = timeline.covers === "step" ? "The last whole step" : "The last forward";
  const charts = [
    new SegmentStrip(timeline),
    ...[
      new MemoryChart("Device memory", data.tiers.device, timeline.memory.device),
      new MemoryChart("Host memory", data.tiers.host, timeline.memory.host),
      new MemoryChart("NVMe", data.tiers.nvme, timeline.memory.nvme ?? null),
    ].filter((chart) => chart.peak),
    ...[0, 1].map((tier) => new ChunkMap(timeline, tier)).filter((map) => map.rows.length),
    new Lanes(timeline),
  ];
  frame.axis = new Axis(timeline.seconds * 1e6, timeline.moments.at_us);
  frame.charts = charts.map(addChart);
  byId("by-moment").disabled = timeline.moments.at_us.length < 2;
}

function addChart(chart) {
  const box = element("div", "chart"), head = element("div", "chart-head"), legend = element("div", "legend");
  const plot = element("div", "plot"), canvas = element("canvas");
  const cursor = element("div", "cursor"), selection = element("div", "selection");
  for (const [colour, name, faint] of chart.legend) legend.append(swatched("span", colour, name, faint));
  head.append(element("h3", "", chart.title), legend);
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", chart.title);
  plot.setAttribute("aria-description", chart.summary());
  plot.append(canvas, selection, cursor);
  box.append(head, plot);
  byId("charts").append(box);
  const shown = { chart, plot, canvas, cursor, selection };
  listen(shown);
  return shown;
}

function swatched(tag, colour, text, faint) {
  const label = element(tag);
  if (colour) {
    const swatch = element("i", faint ? "faint" : "");
    swatch.style.background = `var(${colour})`;
    label.append(swatch);
  }
  label.append(text);
  return label;
}

function redraw() {
  if (frame.requested || !frame.axis) return;
  frame.requested = true;
  requestAnimationFrame(() => {
    frame.requested = false;
    const start = performance.now();
    for (const { chart, plot, canvas } of frame.charts) {
      const width = plot.clientWidth;
      if (width <= GUTTER) continue; // not laid out yet, or a window of no width: the next resize draws
      chart.draw(new Pen(canvas, frame.axis, width, chart.height(width)));
    }
    frame.milliseconds = performance.now() - start;
    byId("zoom-reset").disabled = byId("zoom-out").disabled = frame.axis.showsAll;
  });
}

// ---- hover and zoom -------------------------------------------------------------------------------------------------
function listen(shown) {
  const { plot, selection } = shown;
  let pressedAt = null;
  const inside = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - box.left, GUTTER), box.width);
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressedAt = inside(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    hover(shown, event, inside(event));
    if (pressedAt === null) return;
    const x = inside(event);
    selection.style.visibility = Math.abs(x - pressedAt) > 4 ? "visible" : "hidden";
    selection.style.left = `${Math.min(x, pressedAt)}px`;
    selection.style.width = `${Math.abs(x - pressedAt)}px`;
  });
  plot.addEventListener("pointerup", (event) => {
    const from = pressedAt, until = inside(event);
    stop();
    if (from !== null && Math.abs(until - from) > 4) {
      const places = [from, until].map((x) => placeAt(plot, x)).sort((a, b) => a - b);
      zoom(() => frame.axis.zoomTo(...places));
    }
  });
  const stop = () => { pressedAt = null; selection.style.visibility = "hidden"; };
  plot.addEventListener("pointercancel", stop);
  plot.addEventListener("pointerleave", hideTip);
  plot.addEventListener("dblclick", () => zoom(() => frame.axis.showAll()));
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // plain wheels scroll the page
    event.preventDefault();
    const place = placeAt(plot, inside(event));
    zoom(() => frame.axis.zoomAround(place, Math.exp(event.deltaY * .002)));
  }, { passive: false });
}

function placeAt(plot, x) {
  const [from, until] = frame.axis.view, left = GUTTER;
  return from + ((x - left) / (plot.clientWidth - left)) * (until - from);
}

function zoom(change) {
  change();
  hideTip();
  redraw();
}

function hover(shown, event, x) {
  const us = frame.axis.time(placeAt(shown.plot, x));
  for (const { cursor } of frame.charts) {
    cursor.style.visibility = "visible";
    cursor.style.transform = `translateX(${x}px)`;
  }
  const tip = byId("tip");
  tip.replaceChildren(...tipLines(shown.chart, us, event.clientY - shown.plot.getBoundingClientRect().top));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth - 8 ? event.clientX - 16 - box.width : event.clientX + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
}

function tipLines(chart, us, y) {
  const { at_us: at, operator } = data.timeline.moments;
  const moment = lastAtOrBefore(at, us);
  const title = element("div");
  title.append(element("b", "", formatSeconds(us / 1e6)));
  if (moment >= 0) title.append(` · moment ${moment + 1}: ${data.timeline.operators[operator[moment]]}`);
  const lines = chart.describe(us, y).map(([colour, name, value, faint]) => {
    const line = element("div", "line");
    line.append(swatched("span", colour, name, faint), element("span", "", value));
    return line;
  });
  return [title, ...lines];
}

function hideTip() {
  byId("tip").hidden = true;
  for (const { cursor } of frame.charts) cursor.style.visibility = "hidden";
}

function setAxis(byMoment) {
  byId("by-time").setAttribute("aria-pressed", String(!byMoment));
  byId("by-moment").setAttribute("aria-pressed", String(byMoment));
  zoom(() => frame.axis.setMode(byMoment));
}

function listenToTools() {
  const middle = () => (frame.axis.view[0] + frame.axis.view[1]) / 2;
  const actions = {
    "zoom-in": () => frame.axis.zoomAround(middle(), .5), "zoom-out": () => frame.axis.zoomAround(middle(), 2),
    "zoom-reset": () => frame.axis.showAll(),
  };
  for (const [id, change] of Object.entries(actions)) byId(id).addEventListener("click", () => zoom(change));
  byId("by-time").addEventListener("click", () => setAxis(false));
  byId("by-moment").addEventListener("click", () => setAxis(true));
  const keys = {
    "+": actions["zoom-in"], "=": actions["zoom-in"], "-": actions["zoom-out"], 0: actions["zoom-reset"],
    ArrowLeft: () => frame.axis.pan(-.25), ArrowRight: () => frame.axis.pan(.25),
  };
  addEventListener("keydown", (event) => {
    if (!(event.key in keys) || !frame.axis || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    zoom(keys[event.key]);
  });
}

// ---- theme ----------------------------------------------------------------------------------------------------------
function listenToTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    byId("theme").textContent = dark ? "Light" : "Dark";
    redraw();
  };
  apply(system.matches);
  system.addEventListener("change", () => apply(system.matches));
  byId("theme").addEventListener("click", () => apply(document.documentElement.dataset.theme !== "dark"));
}

fillHead();
fillVerdict();
fillHistory();
fillNumbers();
fillPlanned();
fillLinks();
fillBeside();
fillWaits();
makeCharts();
listenToTools();
listenToTheme();
addEventListener("resize", redraw);
redraw();
