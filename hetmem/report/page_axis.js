"use strict";
// What all charts share: text for numbers, search in sorted columns, the horizontal axis, a pen.

const GUTTER = 64; // CSS pixels: the widest label of a row or of bytes

// ---- text -----------------------------------------------------------------------------------------------------------
function formatBytes(bytes) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(bytes) >= size) return `${(bytes / size).toFixed(2)} ${unit}`;
  return `${bytes.toFixed(0)} B`;
}

function formatSeconds(seconds) {
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${(seconds * 1e6).toFixed(0)} µs`;
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const formatShare = (share) => `${(share * 100).toFixed(1)}%`;

const ROLE_NAMES = {
  param: "Weights", compute: "16-bit weights", grad: "Gradients", exp_avg: "First moment", exp_avg_sq: "Second moment",
  kept: "Kept for homes on the device", activations: "Activations", non_model: "Everything else",
};
const roleName = (role) => ROLE_NAMES[role] ?? role;
const roleColour = (role) => (role in ROLE_NAMES ? `--${role.replaceAll("_", "-")}` : "--other");
const LINK_NAMES = ["Host to device", "Device to host", "NVMe read", "NVMe write"];

// ---- search ---------------------------------------------------------------------------------------------------------
/** Return the index of the last element that is not above `value`; -1 if there is none. */
function lastAtOrBefore(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Return the union of the intervals as disjoint intervals in order. */
function union(from, until) {
  const order = from.map((_, index) => index).sort((a, b) => from[a] - from[b]);
  const merged = [];
  for (const index of order) {
    const last = merged[merged.length - 1];
    if (last && from[index] <= last[1]) last[1] = Math.max(last[1], until[index]);
    else merged.push([from[index], until[index]]);
  }
  return merged;
}

// ---- the axis -------------------------------------------------------------------------------------------------------
/** Maps microseconds to positions on the axis and back; it is linear in time or in moments. `view`: its visible part. */
class Axis {
  constructor(totalUs, momentsUs) {
    this.totalUs = Math.max(1, totalUs);
    this.knots = [0, ...momentsUs, this.totalUs];
    this.byMoment = false;
    this.showAll();
  }

  get length() { return this.byMoment ? this.knots.length - 1 : this.totalUs; }

  get showsAll() { return this.view[1] - this.view[0] >= this.length * .9999; }

  showAll() { this.view = [0, this.length]; }

  place(us) {
    if (!this.byMoment) return us;
    const index = Math.min(lastAtOrBefore(this.knots, us), this.knots.length - 2);
    const width = this.knots[index + 1] - this.knots[index];
    return index + (width ? Math.min(1, (us - this.knots[index]) / width) : 0);
  }

  time(place) {
    if (!this.byMoment) return place;
    const index = Math.min(Math.floor(place), this.knots.length - 2);
    return this.knots[index] + (place - index) * (this.knots[index + 1] - this.knots[index]);
  }

  setMode(byMoment) {
    const shown = this.showsAll ? null : this.view.map((place) => this.time(place));
    this.byMoment = byMoment;
    if (shown) this.zoomTo(...shown.map((us) => this.place(us)));
    else this.showAll();
  }

  zoomTo(from, until) {
    const least = this.byMoment ? 4 : Math.min(20, this.totalUs);
    const width = Math.min(this.length, Math.max(least, until - from));
    const start = Math.min(Math.max(0, (from + until - width) / 2), this.length - width);
    this.view = [start, start + width];
  }

  zoomAround(place, factor) {
    this.zoomTo(place - (place - this.view[0]) * factor, place + (this.view[1] - place) * factor);
  }

  pan(share) {
    const by = (this.view[1] - this.view[0]) * share;
    this.zoomTo(this.view[0] + by, this.view[1] + by);
  }
}

// ---- drawing --------------------------------------------------------------------------------------------------------
/** A canvas context with the axis applied: `x(us)` is in CSS pixels, the plot lies in [left, width]. */
class Pen {
  constructor(canvas, axis, width, height) {
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    this.context = canvas.getContext("2d");
    this.context.scale(scale, scale);
    this.axis = axis;
    this.left = GUTTER;
    this.width = width;
    this.height = height;
    this.plotWidth = width - this.left;
    this.styles = getComputedStyle(document.documentElement);
    this.colours = {};
  }

  colour(name) { return this.colours[name] ??= this.styles.getPropertyValue(name); }

  x(us) {
    const [from, until] = this.axis.view;
    return this.left + ((this.axis.place(us) - from) / (until - from)) * this.plotWidth;
  }

  /** Draw a rectangle from `from` to `until`, at least `least` pixels wide; nothing if it is out of view. */
  span(from, until, y, height, least = 1) {
    let start = this.x(from), end = this.x(until);
    if (end < this.left || start > this.width) return;
    if (end - start < least) end = start + least;
    start = Math.max(start, this.left);
    this.context.fillRect(start, y, Math.min(end, this.width) - start, height);
  }

  text(text, x, y, { align = "left", colour = "--quiet", size = 11, weight = 400 } = {}) {
    this.context.font = `${weight} ${size}px system-ui, sans-serif`;
    this.context.textAlign = align;
    this.context.textBaseline = "middle";
    this.context.fillStyle = this.colour(colour);
    this.context.fillText(text, x, y);
  }

  line(y, colour, dash = []) {
    this.context.strokeStyle = this.colour(colour);
    this.context.setLineDash(dash);
    this.context.lineWidth = 1;
    this.context.beginPath();
    this.context.moveTo(this.left, Math.round(y) + .5);
    this.context.lineTo(this.width, Math.round(y) + .5);
    this.context.stroke();
    this.context.setLineDash([]);
  }

  /** Return for each pixel column the sample with the greatest total, so that no peak is lost at any zoom. */
  columns(atUs, totals) {
    const count = Math.max(1, Math.floor(this.plotWidth));
    const [from, until] = this.axis.view;
    const chosen = new Int32Array(count);
    let sample = Math.max(0, lastAtOrBefore(atUs, this.axis.time(from)));
    for (let column = 0; column < count; column++) {
      const end = this.axis.time(from + ((column + 1) / count) * (until - from));
      let best = sample;
      while (sample + 1 < atUs.length && atUs[sample + 1] < end) {
        sample++;
        if (totals[sample] > totals[best]) best = sample;
      }
      chosen[column] = best;
    }
    return chosen;
  }
}
