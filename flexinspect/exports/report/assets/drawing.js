// Drawing: canvases that follow the colours of the page, charts of one value per step, grids.

const Drawing = (() => {
  /** Returns a colour of the style sheet by its name. */
  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  /** Returns red, green and blue of a colour, 0 to 255. */
  const parsed = new Map();
  function rgb(name) {
    const text = color(name);
    if (!parsed.has(text)) {
      const number = parseInt(text.slice(1), 16);
      parsed.set(text, [number >> 16, (number >> 8) & 255, number & 255]);
    }
    return parsed.get(text);
  }

  /** Returns a colour between two named ones, as text. */
  function mix(from, to, share) {
    const a = rgb(from), b = rgb(to);
    return `rgb(${a.map((part, i) => Math.round(part + (b[i] - part) * share)).join(" ")})`;
  }

  /** Sizes a canvas for the screen; returns its context and its size in CSS pixels. */
  function prepare(canvas, height = null) {
    if (height !== null) canvas.style.height = `${height}px`;
    const ratio = window.devicePixelRatio || 1;
    const box = { width: canvas.clientWidth, height: canvas.clientHeight };
    canvas.width = Math.max(Math.round(box.width * ratio), 1);
    canvas.height = Math.max(Math.round(box.height * ratio), 1);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    context.font = `12px ${color("sans")}`;
    return { context, ...box };
  }

  /** Returns the lowest and the highest finite value, null without any. */
  function bounds(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values)
      if (Number.isFinite(value)) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    return low <= high ? [low, high] : null;
  }

  const INSET = 2, MAX_STEP_WIDTH = 48;

  /** Returns how wide a step is in a chart, and keeps it for clicks. */
  function stepWidth(canvas, width, nSteps) {
    canvas.stepWidth = Math.min((width - 2 * INSET) / Math.max(nSteps, 1), MAX_STEP_WIDTH);
    return canvas.stepWidth;
  }

  /**
   * Draws one bar per value over the width; the current one is marked by a line above and below.
   * Of more values than pixels the highest one of each pixel is drawn. NaN is drawn as "!".
   */
  function bars(canvas, values, current, { fromZero = true, marks = new Map() } = {}) {
    const { context, width, height } = prepare(canvas), top = 14, bottom = height - 2;
    const limits = bounds(values), each = stepWidth(canvas, width, values.length);
    context.translate(INSET, 0);
    const low = limits ? (fromZero ? Math.min(0, limits[0]) : limits[0]) : 0;
    const span = limits ? limits[1] - low || Math.abs(limits[1]) || 1 : 1;
    const y = (value) => bottom - ((value - low) / span) * (bottom - top - 2) - 2;
    const gap = each >= 4 ? 1 : 0, dim = color("between"), full = color("open");
    context.fillStyle = color("line");
    context.fillRect(0, bottom, Math.min(each * values.length, width), 1);
    values.forEach((value, index) => {
      const isCurrent = index === current, x = index * each;
      context.fillStyle = isCurrent ? full : dim;
      if (!limits) context.fillRect(x, (top + bottom) / 2, Math.max(each - gap, 1), (bottom - top) / 2);
      if (Number.isFinite(value)) {
        const at = Math.min(y(value), bottom - 2);
        context.fillRect(x, at, Math.max(each - gap, 1), bottom - at);
      } else if (Number.isNaN(value)) {
        context.fillStyle = color("error");
        context.fillText("!", x + each / 2 - 2, bottom - 3);
      }
      if (marks.has(index)) mark(context, marks.get(index), x + each / 2);
    });
    if (current >= 0) {
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      context.strokeRect(current * each - 1, top - 1, Math.max(each - gap, 2) + 2, bottom - top + 2);
    }
  }

  const SIGNS = { error: "✖", warning: "▲", note: "●" };

  /** Draws the sign of a finding above a step. */
  function mark(context, severity, x) {
    context.fillStyle = color(severity === "note" ? "muted" : severity);
    context.font = `11px ${color("sans")}`;
    context.textAlign = "center";
    context.fillText(SIGNS[severity], x, 10);
    context.textAlign = "start";
  }

  /** Draws values as a line; gaps where they are not finite. `log` draws their logarithms. */
  function line(canvas, values, current, { log = false } = {}) {
    const shown = log ? Array.from(values, (value) => (value > 0 ? Math.log10(value) : NaN)) : values;
    const { context, width, height } = prepare(canvas), limits = bounds(shown);
    const each = stepWidth(canvas, width, shown.length), top = 4, bottom = height - 4;
    context.translate(INSET, 0);
    const [low, high] = limits ?? [0, 1], span = high - low || 1;
    const x = (index) => (index + 0.5) * each;
    const y = (value) => bottom - ((value - low) / span) * (bottom - top);
    context.fillStyle = color("line");
    context.fillRect(0, height - 1, Math.min(each * shown.length, width), 1);
    if (current >= 0) {
      context.fillStyle = mix("paper", "ink", 0.12);
      context.fillRect(x(current) - Math.max(each, 3) / 2, 0, Math.max(each, 3), height);
    }
    context.strokeStyle = color("open");
    context.lineWidth = 1.5;
    context.beginPath();
    let isDown = false;
    shown.forEach((value, index) => {
      if (!Number.isFinite(value)) {
        isDown = false;
        return;
      }
      if (isDown) context.lineTo(x(index), y(value));
      else context.moveTo(x(index), y(value));
      isDown = true;
    });
    context.stroke();
    if (current >= 0 && Number.isFinite(shown[current])) dot(context, x(current), y(shown[current]));
  }

  function dot(context, x, y) {
    context.fillStyle = color("ink");
    context.beginPath();
    context.arc(x, y, 3, 0, 2 * Math.PI);
    context.fill();
  }

  /** Calls `pick` with the index of the value under a click, or under the pointer while it drags. */
  function onPick(canvas, pick) {
    const at = (event) => Math.floor((event.offsetX - INSET) / (canvas.stepWidth || 1));
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pick(at(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) pick(at(event));
    });
  }

  /**
   * Draws a grid of cells with the names of its rows at the left, and of every few columns above.
   * `fill(row, column)` returns {color, text}; a cell without a colour stays empty.
   */
  function grid(canvas, { rows, columns, fill, current, maxCell = 26, minCell = 4 }) {
    const left = 34, top = 18, room = canvas.clientWidth - left - 2;
    const wide = Math.max(Math.min(room / Math.max(columns.length, 1), maxCell), 0.5);
    const high = Math.max(Math.min(maxCell, 420 / Math.max(rows.length, 1)), minCell);
    const { context } = prepare(canvas, top + high * rows.length + 4);
    canvas.gridAt = (x, y) => {
      const row = Math.floor((y - top) / high), column = Math.floor((x - left) / wide);
      const inside = row >= 0 && row < rows.length && column >= 0 && column < columns.length;
      return inside ? { row, column } : null;
    };
    const gap = wide >= 6 && high >= 6 ? 1 : 0;
    context.textBaseline = "middle";
    rows.forEach((_, row) => columns.forEach((_, column) => {
      const cell = fill(row, column);
      if (!cell) return;
      context.fillStyle = cell.color;
      context.fillRect(left + column * wide, top + row * high, Math.max(wide - gap, 0.5), high - gap);
      if (cell.text && wide >= 9 && high >= 11) {
        context.fillStyle = cell.ink ?? color("ink");
        context.textAlign = "center";
        context.fillText(cell.text, left + (column + 0.5) * wide, top + (row + 0.5) * high);
      }
    }));
    labels(context, rows, high, (at) => [left - 6, top + at], "right", current.row);
    labels(context, columns, wide, (at) => [left + at, top - 9], "center", current.column);
    if (current.row >= 0 && current.column >= 0) {
      context.strokeStyle = color("ink");
      context.lineWidth = 2;
      const x = left + current.column * wide, y = top + current.row * high;
      context.strokeRect(x - 1, y - 1, wide - gap + 2, high - gap + 2);
    }
  }

  /** Writes as many of some names as there is room for, and always the current one. */
  function labels(context, names, each, place, align, current) {
    const needed = align === "center" ? 26 : 14;
    const stride = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * each >= needed) ?? 5000;
    context.textAlign = align;
    names.forEach((name, index) => {
      const isNear = Math.abs(index - current) * each < needed && index !== current;
      if (index !== current && (index % stride || (isNear && current >= 0))) return;
      context.fillStyle = color(index === current ? "ink" : "muted");
      context.fillText(String(name), ...place((index + 0.5) * each));
    });
    context.textAlign = "start";
  }

  // -- elements -----------------------------------------------------------------------------------

  /** Makes an element with a class and children; texts are never read as HTML. */
  function element(name, className = "", ...children) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  /** Makes a table of names, numbers and bars. `rows` are {cells, share, color, chosen}. */
  function barTable(caption, header, rows) {
    const table = element("table", "bars", element("caption", "", caption));
    if (header) {
      const names = header.map((name) => element("th", "", name));
      names.forEach((cell) => cell.setAttribute("scope", "col"));
      table.append(element("thead", "", element("tr", "", ...names, element("th"))));
    }
    const body = element("tbody");
    for (const row of rows) {
      const [name, ...numbers] = row.cells.map(String);
      const line = element("tr", row.chosen ? "chosen" : "", element("td", "name", name));
      line.append(...numbers.map((text) => element("td", "number", text)));
      const fill = element("span", "fill");
      fill.style.setProperty("--share", Math.min(Math.max(row.share || 0, 0), 1));
      if (row.color) fill.style.setProperty("--color", `var(--${row.color})`);
      line.append(element("td", "bar", fill));
      body.append(line);
    }
    table.append(body);
    return table;
  }

  /** Makes pressed buttons of {value, label}, of which one is chosen. */
  function choice(parent, options, chosen, choose) {
    parent.replaceChildren(...options.map(({ value, label }) => {
      const button = element("button", "", label);
      button.type = "button";
      button.setAttribute("aria-pressed", String(value === chosen));
      button.addEventListener("click", () => choose(value));
      return button;
    }));
  }

  // -- numbers ------------------------------------------------------------------------------------

  /** Returns a number with three significant digits, in exponents where it is very small or large. */
  function number(value) {
    if (value === null || value === undefined) return "–";
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "-Inf";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  /** Returns 2 as "2nd". */
  function ordinal(n) {
    const isTeen = n % 100 > 10 && n % 100 < 14;
    return `${n}${isTeen ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th"}`;
  }

  function percent(share) {
    if (!Number.isFinite(share)) return "–";
    return share > 0 && share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`;
  }

  function bytes(size) {
    if (!Number.isFinite(size)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    for (; Math.abs(size) >= 999.5 && unit < units.length - 1; unit++) size /= 1000;
    return `${unit ? Number(size.toPrecision(3)) : size} ${units[unit]}`;
  }

  return { color, rgb, mix, prepare, bounds, bars, line, onPick, grid, element, barTable,
    choice, number, ordinal, percent, bytes, SIGNS };
})();
