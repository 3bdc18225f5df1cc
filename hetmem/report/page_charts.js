// The charts, drawn over one horizontal axis. Each has: title, legend, height(width), draw(pen), describe(us, y).

// ---- what ran -------------------------------------------------------------------------------------------------------
class SegmentStrip {
  constructor(timeline) {
    this.title = "What ran";
    this.legend = [];
    this.timeline = timeline;
  }

  height() { return 44; }

  summary() {
    return this.timeline.segments.map(([what, from, until]) => `${this.label(what)} ${formatSeconds((until - from) / 1e6)}`).join(", ");
  }

  /** Where nothing moves, the log does not show where the forward ends and the backward begins. */
  label(what) {
    if (what === "step") return "optimizer step";
    const alone = this.timeline.covers === "step" && !this.timeline.segments.some(([other]) => other === "backward");
    return what === "forward" && alone ? "forward and backward" : what;
  }

  draw(pen) {
    for (const [what, from, until] of this.timeline.segments) {
      pen.context.fillStyle = pen.colour("--segment");
      pen.span(from, until, 0, 22);
      const start = Math.max(pen.left, pen.x(from)), end = Math.min(pen.width, pen.x(until));
      pen.context.fillStyle = pen.colour("--paper");
      pen.context.fillRect(end - 1, 0, 1, 22);
      pen.context.font = "11px system-ui, sans-serif";
      const label = this.label(what);
      if (pen.context.measureText(label).width + 10 < end - start) pen.text(label, start + 6, 11.5, { colour: "--ink" });
    }
    this.drawTicks(pen);
  }

  drawTicks(pen) {
    const [from, until] = pen.axis.view;
    const wish = (until - from) / Math.max(2, Math.floor(pen.plotWidth / 90));
    const power = 10 ** Math.floor(Math.log10(wish));
    let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= wish);
    if (pen.axis.byMoment) step = Math.max(1, Math.round(step));
    for (let place = Math.ceil(from / step) * step; place <= until; place += step) {
      const x = pen.left + ((place - from) / (until - from)) * pen.plotWidth;
      const label = pen.axis.byMoment ? `${Math.round(place)}` : formatTick(place, step);
      const align = x > pen.width - 24 ? "right" : x < pen.left + 16 ? "left" : "center";
      pen.context.fillStyle = pen.colour("--rule");
      pen.context.fillRect(x, 22, 1, 5);
      pen.text(label, x, 35, { align });
    }
  }

  describe(us) {
    const segment = this.timeline.segments.find(([, from, until]) => from <= us && us < until);
    return segment ? [[null, this.label(segment[0]), formatSeconds((segment[2] - segment[1]) / 1e6)]] : [];
  }
}

function formatTick(us, stepUs) {
  const [unit, size] = stepUs >= 1e6 ? ["s", 1e6] : stepUs >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  return `${Number((us / size).toPrecision(9))} ${unit}`;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
const WHOLE_ROLES = ["activations", "non_model"]; // which are no copies of chunks

/** Bytes of one tier over time: homes below (constant), copies on them, everything else on top. */
class MemoryChart {
  constructor(title, tier, memory) {
    this.title = title;
    this.capacity = tier.capacity_bytes;
    this.atUs = memory ? memory.at_us : [0];
    const homes = Object.entries(tier.homes).map(([role, bytes]) => ({ role, name: roleName(role), at: () => bytes }));
    const copies = Object.entries(memory ? memory.bytes : {}).map(([role, bytes]) => ({
      role, at: (index) => bytes[index], copy: homes.length > 0 && !WHOLE_ROLES.includes(role),
      name: WHOLE_ROLES.includes(role) ? roleName(role) : `${roleName(role)}${homes.length ? ", staged" : ", copies"}`,
    }));
    const order = Object.keys(ROLE_NAMES);
    this.series = [...homes, ...copies].sort((a, b) =>
      Boolean(a.copy) - Boolean(b.copy) || order.indexOf(a.role) - order.indexOf(b.role));
    this.totals = this.atUs.map((_, index) => this.series.reduce((sum, series) => sum + series.at(index), 0));
    this.peak = Math.max(...this.totals, 0);
    this.top = this.peak > .3 * this.capacity ? Math.max(this.capacity, this.peak) : this.peak * 1.3 || 1;
    this.series = this.series.filter((series) => this.atUs.some((_, index) => series.at(index)));
    this.legend = this.series.map((series) => [roleColour(series.role), series.name, series.copy]);
    this.flat = this.atUs.length === 1;
    this.onlyHomes = this.series.every((series) => homes.includes(series));
  }

  summary() {
    return `${this.highest()}, budget ${formatBytes(this.capacity)}`;
  }

  /** Where only homes are known, the peak may have been higher. */
  highest() { return `${this.onlyHomes ? "homes of" : "peak"} ${formatBytes(this.peak)}`; }

  height(width) { return this.flat ? 84 : width < 600 ? 150 : 190; }

  draw(pen) {
    const base = pen.height - 6, head = 14;
    const y = (bytes) => base - (bytes / this.top) * (base - head);
    const chosen = pen.columns(this.atUs, this.totals);
    const floor = new Float64Array(chosen.length);
    for (const series of this.series) this.area(pen, series, chosen, floor, y);
    pen.line(base, "--rule");
    pen.text("0", pen.left - 8, base - 2, { align: "right" });
    if (this.capacity > this.top) {
      pen.text(`${this.highest()}; the budget of ${formatBytes(this.capacity)} lies far above`, pen.width, 6, { align: "right" });
      return;
    }
    pen.line(y(this.capacity), "--ink", [4, 3]);
    pen.text(`budget ${formatBytes(this.capacity)}`, pen.width, y(this.capacity) - 8, { align: "right", colour: "--ink" });
    pen.text(formatBytes(this.capacity).replace(/\.\d+/, ""), pen.left - 8, y(this.capacity), { align: "right" });
    if (!this.flat) pen.text(formatBytes(this.capacity / 2).replace(/\.00 /, " ").replace(/(\.\d)\d/, "$1"), pen.left - 8, y(this.capacity / 2), { align: "right" });
  }

  area(pen, series, chosen, floor, y) {
    const step = pen.plotWidth / chosen.length, context = pen.context;
    const back = [];
    context.beginPath();
    context.moveTo(pen.left, y(floor[0]));
    for (let column = 0; column < chosen.length; column++) {
      const x = pen.left + column * step;
      back.push([x, y(floor[column])]);
      floor[column] += series.at(chosen[column]);
      context.lineTo(x, y(floor[column]));
      context.lineTo(x + step, y(floor[column]));
    }
    for (let column = chosen.length - 1; column >= 0; column--) {
      context.lineTo(back[column][0] + step, back[column][1]);
      context.lineTo(back[column][0], back[column][1]);
    }
    context.closePath();
    context.fillStyle = pen.colour(roleColour(series.role));
    context.globalAlpha = series.copy ? .5 : .9;
    context.fill();
    context.globalAlpha = 1;
  }

  describe(us) {
    const index = Math.max(0, lastAtOrBefore(this.atUs, us));
    const lines = this.series.map((series) => [roleColour(series.role), series.name, formatBytes(series.at(index)), series.copy]);
    return [...lines.reverse(), [null, "Together", formatBytes(this.totals[index])]];
  }
}

// ---- the map of chunks ----------------------------------------------------------------------------------------------
/** One row per block, in the order of chunks: the times of its copy, its transfers, its uses and its stalls. */
class ChunkMap {
  constructor(timeline, tier) {
    this.timeline = timeline;
    this.tier = tier;
    this.title = tier ? "Chunks in host staging" : "Chunks on the device";
    const copies = timeline.copies, roles = Object.keys(ROLE_NAMES);
    const indices = copies.block.map((_, index) => index).filter((index) => copies.tier[index] === tier);
    this.copies = indices;
    const shown = new Set(indices.map((index) => copies.block[index]));
    this.stalls = timeline.stalls.block.map((_, index) => index).filter((index) => !tier && timeline.stalls.block[index] >= 0);
    this.stalls.forEach((index) => shown.add(timeline.stalls.block[index]));
    const facts = timeline.blocks;
    this.rows = [...shown].sort((a, b) =>
      roles.indexOf(facts[a].role) - roles.indexOf(facts[b].role) || facts[a].chunk - facts[b].chunk);
    this.rowOf = new Map(this.rows.map((block, row) => [block, row]));
    const used = [...new Set(this.rows.map((block) => facts[block].role))];
    this.legend = [...used.map((role) => [roleColour(role), tier ? roleName(role) : "Copy on the device"]), ["--muted", "On its way"]];
    if (!tier) this.legend.push(["--ink", "Used"], ["--bad", "Compute waited"]);
  }

  summary() {
    return `${this.rows.length} rows` + (this.tier ? "" : `, ${this.stalls.length} ${this.stalls.length === 1 ? "stall" : "stalls"}`);
  }

  height() {
    return Math.max(24, Math.round(this.rows.length * this.rowHeight()) + 8);
  }

  rowHeight() { return Math.min(9, Math.max(1.5, 380 / Math.max(1, this.rows.length))); }

  draw(pen) {
    const row = this.rowHeight(), gap = row >= 5 ? 1 : 0;
    const top = (block) => 2 + this.rowOf.get(block) * row;
    this.drawCopies(pen, top, row - gap);
    if (!this.tier) {
      this.drawUses(pen, top, row - gap);
      this.drawStalls(pen, top, row - gap);
    }
    this.drawLabels(pen, row);
  }

  /** Label the first and the last chunk of each role with its number, where there is room. */
  drawLabels(pen, row) {
    const facts = this.rows.map((block) => this.timeline.blocks[block]);
    let free = -Infinity;
    facts.forEach((fact, index) => {
      const edge = fact.role !== facts[index - 1]?.role || fact.role !== facts[index + 1]?.role;
      const y = Math.max(7, 2 + (index + .5) * row);
      if (!edge || y < free) return;
      pen.text(`${index ? "" : "chunk "}${fact.chunk}`, pen.left - 8, y, { align: "right" });
      free = y + 13;
    });
  }

  drawCopies(pen, top, height) {
    const { block, from_us: from, valid_us: valid, until_us: until } = this.timeline.copies;
    const colours = this.timeline.blocks.map((facts) => pen.colour(roleColour(facts.role)));
    const moving = pen.colour("--muted");
    for (const index of this.copies) {
      const y = top(block[index]);
      pen.context.fillStyle = moving;
      if (valid[index] > from[index]) pen.span(from[index], valid[index], y, height);
      pen.context.fillStyle = colours[block[index]];
      pen.context.globalAlpha = .62;
      pen.span(valid[index], until[index], y, height, .5);
      pen.context.globalAlpha = 1;
    }
  }

  drawUses(pen, top, height) {
    const { at_us: at, blocks } = this.timeline.moments;
    const last = new Map();
    pen.context.fillStyle = pen.colour("--ink");
    for (let index = 0; index < at.length; index++) {
      const x = Math.round(pen.x(at[index]));
      if (x < pen.left || x > pen.width) continue;
      for (const block of blocks[index]) {
        if (!this.rowOf.has(block) || last.get(block) === x) continue; // one mark a pixel
        last.set(block, x);
        pen.context.fillRect(x, top(block), 1, height);
      }
    }
  }

  drawStalls(pen, top, height) {
    const { block, from_us: from, until_us: until } = this.timeline.stalls;
    pen.context.fillStyle = pen.colour("--bad");
    for (const index of this.stalls) pen.span(from[index], until[index], top(block[index]), height, 3);
  }

  describe(us, y) {
    const block = this.rows[Math.floor((y - 2) / this.rowHeight())];
    if (block === undefined) return [];
    const facts = this.timeline.blocks[block], copies = this.timeline.copies, stalls = this.timeline.stalls;
    const there = this.copies.find((index) => copies.block[index] === block && copies.from_us[index] <= us && us < copies.until_us[index]);
    const stall = this.stalls.find((index) => stalls.block[index] === block && stalls.from_us[index] <= us && us <= Math.max(stalls.until_us[index], stalls.from_us[index] + 1));
    let state = "not here";
    if (there !== undefined) state = us < copies.valid_us[there] ? "on its way" : "here";
    const lines = [[roleColour(facts.role), `Chunk ${facts.chunk}, ${roleName(facts.role).toLowerCase()}`, state]];
    if (stall !== undefined) lines.push(["--bad", "Compute waited", formatSeconds((stalls.until_us[stall] - stalls.from_us[stall]) / 1e6)]);
    lines.push([null, `home: ${facts.home}`, formatBytes(facts.bytes)], [null, shortened(facts.parameters.join(", "), 160), ""]);
    return lines;
  }
}

// ---- links ----------------------------------------------------------------------------------------------------------
/** One lane per resource: how much of each pixel's time it was busy. */
class Lanes {
  constructor(timeline) {
    this.title = "Busy resources";
    this.legend = [["--accent", "Busy"], ["--bad", "The step waited"]];
    this.timeline = timeline;
    const model = timeline.segments.filter(([what]) => what !== "step");
    const infers = timeline.covers === "forward" && !timeline.updates.from_us.length;
    const launched = timeline.launched.filter(([what]) => what !== "step");
    const moved = timeline.transfers;
    const ofLink = (link) => moved.link.map((_, index) => index).filter((index) => moved.link[index] === link);
    this.lanes = [
      { name: infers ? "Forward" : "Forward and backward", busy: union(model.map((s) => s[1]), model.map((s) => s[2])) },
      ...(launched.length ? [{ name: "Launching", busy: union(launched.map((s) => s[1]), launched.map((s) => s[2])) }] : []),
      { name: "Host optimizer", busy: union(timeline.updates.from_us, timeline.updates.until_us) },
      ...LINK_NAMES.map((name, link) => {
        const indices = ofLink(link);
        return { name, link, indices, busy: union(indices.map((i) => moved.from_us[i]), indices.map((i) => moved.until_us[i])) };
      }),
      { name: "Stalls", colour: "--bad", busy: union(timeline.stalls.from_us, timeline.stalls.until_us) },
    ].filter(({ name, busy }) => busy.length || !(name.startsWith("NVMe") || (infers && name !== "Stalls"))); // not used
  }

  height() { return this.lanes.length * 34 + 2; }

  summary() {
    const total = this.timeline.seconds * 1e6 || 1;
    return this.lanes.map(({ name, busy }) =>
      `${name} ${formatShare(busy.reduce((sum, [from, until]) => sum + until - from, 0) / total)}`).join(", ");
  }

  draw(pen) {
    this.lanes.forEach((lane, index) => {
      const top = index * 34;
      pen.text(lane.name, pen.left, top + 8);
      pen.context.fillStyle = pen.colour("--raised");
      pen.context.fillRect(pen.left, top + 16, pen.plotWidth, 14);
      this.drawBusy(pen, lane, top + 16, 14);
    });
  }

  drawBusy(pen, lane, top, height) {
    const columns = new Float32Array(Math.ceil(pen.plotWidth) + 1);
    for (const [from, until] of lane.busy) {
      const start = Math.max(0, pen.x(from) - pen.left), end = Math.min(pen.plotWidth, pen.x(until) - pen.left);
      for (let column = Math.floor(start); column < end; column++)
        columns[column] += Math.min(end, column + 1) - Math.max(start, column);
    }
    pen.context.fillStyle = pen.colour(lane.colour ?? "--accent");
    columns.forEach((share, column) => {
      if (!share) return;
      const tall = Math.max(1, Math.min(1, share) * height);
      pen.context.fillRect(pen.left + column, top + height - tall, 1, tall);
    });
  }

  describe(us, y) {
    const lane = this.lanes[Math.floor(y / 34)];
    if (!lane) return [];
    const moved = this.timeline.transfers;
    const flying = (lane.indices ?? []).filter((index) => moved.from_us[index] <= us && us <= moved.until_us[index]);
    const lines = [[null, lane.name, lane.busy.some(([from, until]) => from <= us && us <= until) ? "busy" : "idle"]];
    for (const index of flying.slice(0, 5)) {
      const facts = this.timeline.blocks[moved.block[index]];
      const name = facts ? `${roleName(facts.role).toLowerCase()} of chunk ${facts.chunk}` : "gradient";
      lines.push([null, name, `${formatBytes(moved.bytes[index])} in ${formatSeconds((moved.until_us[index] - moved.from_us[index]) / 1e6)}`]);
    }
    return lines;
  }
}
