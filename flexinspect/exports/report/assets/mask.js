// Mask: which keys each row attends to, on a canvas that zooms and pans, with one cell in words.

const Mask = (() => {
  const { color, rgb } = Drawing;
  // The states of flexinspect.masks.viewport; 1 to 5 are shares of several cells.
  const OPEN = 6, UNKNOWN = 7, LOST = 8, LEAKED = 9, BOTH = 10, APPLIED = 11;
  const VIEWS = [
    { value: "executed", label: "ran" },
    { value: "received", label: "passed in" },
    { value: "declared", label: "intended" },
    { value: "difference", label: "what differs" },
  ];
  const canvas = document.getElementById("mask-canvas"), words = document.getElementById("mask-words");
  const AXIS = 10, LEFT_TEXT = 96, TOP_TEXT = 76, MIN_TEXT_CELL = 13, MAX_CELL = 44, MIN_SIGN_CELL = 7, MIN_MAX_ZOOM = 3;
  const MAX_HEIGHT = 560, MIN_HEIGHT = 160; // of the canvas, in CSS pixels

  let wanted = null; // the view that the reader chose
  let masks = null, views = null, plane = null, view = "executed";
  let zoom = 1, originX = 0, originY = 0; // zoom 1 shows everything; the origin is in cells of the plane
  let hovered = null, shownPlace = null, drawnFor = null;

  // -- what is shown ------------------------------------------------------------------------------

  function draw(run, place) {
    masks = run.contents.masks;
    const missing = document.getElementById("mask-missing");
    document.getElementById("mask").hidden = run.isTraining;
    if (run.isTraining) return;
    views = masks && (masks.views.find((own) => own.layers.includes(place.layer)
      && own.head === Math.min(place.head, own.heads - 1))
      ?? masks.views.find((own) => own.layers.includes(place.layer)));
    missing.hidden = Boolean(views);
    document.getElementById("mask-body").hidden = !views;
    document.getElementById("mask-view").hidden = !views;
    document.getElementById("zoom").hidden = !views;
    if (!views) {
      missing.textContent = masks ? `The mask of layer ${place.layer} was not recorded.`
        : run.contents.missing.masks ?? "No mask was recorded.";
      return;
    }
    const known = VIEWS.filter(({ value }) => value in views.planes);
    view = known.some(({ value }) => value === wanted) ? wanted : defaultView();
    plane = masks.planes[views.planes[view]];
    Drawing.choice(document.getElementById("mask-view"), known, view, setView);
    setHeight();
    if (drawnFor !== plane.shape.join() + run.generation.generation) fit();
    drawnFor = plane.shape.join() + run.generation.generation;
    if (shownPlace && (place.q !== shownPlace.q || place.k !== shownPlace.k)) reveal(place);
    shownPlace = place;
    writeLegend();
    document.getElementById("mask-notes").textContent = [
      views.heads > 1 ? `Head ${views.head} of ${views.heads}.`
        : masks.views.length > 1 ? `${views.layers.length > 1 ? "Layers" : "Layer"} ${views.layers.join(", ")}.` : "The same in all layers and heads.",
      ...views.notes,
    ].join(" ");
    document.getElementById("mask-difference").hidden = firstDifference() === null;
    paint();
    describe(cursor());
  }

  function defaultView() {
    if ("difference" in views.planes && firstDifference()) return "difference";
    return VIEWS.find(({ value }) => value in views.planes).value;
  }

  function setView(value) {
    wanted = value;
    draw(State.run, State.place);
  }

  function nextView() {
    const known = VIEWS.filter(({ value }) => value in views.planes).map(({ value }) => value);
    setView(known[(known.indexOf(view) + 1) % known.length]);
  }

  function firstDifference() {
    if (!("difference" in views.planes)) return null;
    const states = masks.planes[views.planes.difference];
    const at = states.findIndex((state) => state >= LOST && state <= BOTH);
    return at < 0 ? null : { row: Math.floor(at / states.shape[1]), key: at % states.shape[1] };
  }

  // -- cells and pixels ---------------------------------------------------------------------------

  /** The layout of the canvas: margins, size of a cell, and the visible part of the plane. */
  function layout() {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const [rows, keys] = plane.shape;
    const bare = Math.min((width - AXIS) / keys, (height - AXIS) / rows);
    const named = Math.min((width - AXIS - LEFT_TEXT) / keys, (height - AXIS - TOP_TEXT) / rows);
    const canName = masks.scale === 1, fitsNamed = canName && named >= MIN_TEXT_CELL;
    const fitted = fitsNamed ? named : bare, cell = fitted * Math.min(zoom, maxZoom(fitted));
    // The whole mask is shown with the names of its tokens only if it still fits beside them.
    const hasText = canName && cell >= MIN_TEXT_CELL && (fitsNamed || zoom > 1);
    const left = AXIS + (hasText ? LEFT_TEXT : 0), top = AXIS + (hasText ? TOP_TEXT : 0);
    const wide = (width - left) / cell, high = (height - top) / cell;
    originX = Math.max(0, Math.min(originX, keys - wide));
    originY = Math.max(0, Math.min(originY, rows - high));
    return { width, height, rows, keys, cell, left, top, wide, high, hasText, fitted };
  }

  /** Returns how far a mask can be zoomed in whose cells are `fitted` pixels wide as a whole. */
  function maxZoom(fitted) {
    return Math.max(MAX_CELL / fitted, MIN_MAX_ZOOM);
  }

  /** Makes the canvas as high as the whole mask needs, within the height of the window. */
  function setHeight() {
    const [rows, keys] = plane.shape, most = Math.min(MAX_HEIGHT, 0.8 * innerHeight);
    const width = canvas.clientWidth - AXIS, isNamed = (width - LEFT_TEXT) / keys >= MIN_TEXT_CELL;
    const needed = AXIS + (isNamed && masks.scale === 1
      ? TOP_TEXT + ((width - LEFT_TEXT) * rows) / keys : (width * rows) / keys);
    canvas.style.height = `${Math.round(Math.max(Math.min(needed, most), MIN_HEIGHT))}px`;
  }

  function fit() {
    zoom = 1;
    originX = originY = 0;
  }

  /** Zooms by a factor; the cell under (x, y) stays where it is. */
  function zoomBy(factor, x = null, y = null) {
    if (!views) return;
    const before = layout();
    const px = x ?? before.left + (before.width - before.left) / 2;
    const py = y ?? before.top + (before.height - before.top) / 2;
    const atX = originX + (px - before.left) / before.cell, atY = originY + (py - before.top) / before.cell;
    zoom = Math.min(Math.max(zoom * factor, 1), maxZoom(before.fitted));
    if (zoom === 1) fit();
    else {
      const after = layout();
      originX = atX - (px - after.left) / after.cell;
      originY = atY - (py - after.top) / after.cell;
    }
    paint();
  }

  function cellAt(x, y) {
    const { cell, left, top, rows, keys } = layout();
    const key = Math.floor(originX + (x - left) / cell), row = Math.floor(originY + (y - top) / cell);
    return x >= left && y >= top && row < rows && key < keys ? { row, key } : null;
  }

  /** Returns the cell of the place: its row and key, else the newest row of the step. */
  function cursor() {
    const { q, k, s } = State.place, [rows, keys] = plane.shape;
    let row = -1;
    if (q !== null) row = lastIndex(masks.pos, q);
    if (row < 0) row = lastIndex(masks.step, s);
    if (row < 0) return null;
    const key = q !== null && k !== null ? k : masks.pos[row];
    return {
      row: Math.min(Math.floor(row / masks.scale), rows - 1),
      key: Math.min(Math.floor(key / masks.scale), keys - 1),
      isChosen: q !== null,
    };
  }

  function lastIndex(column, value) {
    for (let index = column.length - 1; index >= 0; index--) if (column[index] === value) return index;
    return -1;
  }

  /** Scrolls so that the chosen cell is visible. */
  function reveal() {
    const at = cursor();
    if (!at) return;
    const { wide, high } = layout();
    if (at.key < originX || at.key > originX + wide - 1) originX = at.key - wide / 2;
    if (at.row < originY || at.row > originY + high - 1) originY = at.row - high / 2;
  }

  // -- painting -----------------------------------------------------------------------------------

  function palette() {
    const open = rgb("open"), closed = rgb("closed"), between = (share) =>
      closed.map((part, i) => Math.round(part + (open[i] - part) * share));
    const shares = [1, 2, 3, 4, 5].map((n) => between(0.15 + 0.12 * n));
    const bad = rgb("bad");
    return [closed, ...shares, open, rgb("unknown"), bad, bad, bad, rgb("between")];
  }

  function paint() {
    if (!views) return;
    const shape = layout(), { context } = Drawing.prepare(canvas);
    canvas.classList.toggle("zoomed", zoom > 1);
    canvas.dataset.zoom = zoom.toFixed(2);
    context.save();
    context.beginPath();
    context.rect(shape.left, shape.top, shape.wide * shape.cell, shape.high * shape.cell);
    context.clip();
    paintCells(context, shape);
    if (shape.cell >= MIN_SIGN_CELL) paintSigns(context, shape);
    paintBorders(context, shape);
    paintCursor(context, shape);
    context.restore();
    paintAxes(context, shape);
  }

  /** Draws the visible cells as an image: a pixel for each cell, or the worst cell of each pixel. */
  function paintCells(context, { cell, left, top, wide, high, rows, keys }) {
    const row0 = Math.floor(originY), row1 = Math.min(Math.ceil(originY + high), rows);
    const key0 = Math.floor(originX), key1 = Math.min(Math.ceil(originX + wide), keys);
    const per = Math.max(1, Math.ceil(1 / (cell * (window.devicePixelRatio || 1))));
    const width = Math.ceil((key1 - key0) / per), height = Math.ceil((row1 - row0) / per);
    if (width < 1 || height < 1) return;
    const states = per === 1 ? null : reduce(row0, row1, key0, key1, per, width, height);
    const colors = palette(), image = new ImageData(width, height);
    for (let y = 0, at = 0; y < height; y++)
      for (let x = 0; x < width; x++, at += 4) {
        const state = states ? states[y * width + x] : plane[(row0 + y) * keys + key0 + x];
        [image.data[at], image.data[at + 1], image.data[at + 2]] = colors[state] ?? colors[0];
        image.data[at + 3] = 255;
      }
    const buffer = document.createElement("canvas");
    buffer.width = width;
    buffer.height = height;
    buffer.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const x = left + (key0 - originX) * cell, y = top + (row0 - originY) * cell;
    context.drawImage(buffer, x, y, width * per * cell, height * per * cell);
  }

  /** Returns one state for `per` x `per` cells: a difference before all, else the share of open ones. */
  function reduce(row0, row1, key0, key1, per, width, height) {
    const found = new Uint8Array(width * height), keys = plane.shape[1];
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++) {
        let worst = 0, open = 0, n = 0;
        const bottom = Math.min(row0 + (y + 1) * per, row1), right = Math.min(key0 + (x + 1) * per, key1);
        for (let row = row0 + y * per; row < bottom; row++)
          for (let key = key0 + x * per; key < right; key++, n++) {
            const state = plane[row * keys + key];
            if (state > OPEN && state > worst) worst = state;
            open += Math.min(state, OPEN) / OPEN;
          }
        const share = open / n;
        found[y * width + x] = worst || (share === 0 ? 0 : share === 1 ? OPEN
          : Math.min(Math.max(Math.floor(1 + 5 * share), 1), 5));
      }
    return found;
  }

  /** Draws ✖ on leaked and □ on lost cells, so that colour is not all that tells them apart. */
  function paintSigns(context, { cell, left, top, wide, high, rows, keys }) {
    const inset = cell * 0.28;
    context.strokeStyle = color("paper");
    context.lineWidth = Math.max(cell / 9, 1);
    for (let row = Math.floor(originY); row < Math.min(originY + high, rows); row++)
      for (let key = Math.floor(originX); key < Math.min(originX + wide, keys); key++) {
        const state = plane[row * keys + key];
        const x = left + (key - originX) * cell, y = top + (row - originY) * cell;
        if (cell >= 4) {
          context.fillStyle = color("paper");
          context.fillRect(x + cell - 0.5, y, 0.5, cell);
          context.fillRect(x, y + cell - 0.5, cell, 0.5);
        }
        if (state === LEAKED || state === BOTH) {
          context.beginPath();
          context.moveTo(x + inset, y + inset);
          context.lineTo(x + cell - inset, y + cell - inset);
          context.moveTo(x + cell - inset, y + inset);
          context.lineTo(x + inset, y + cell - inset);
          context.stroke();
        } else if (state === LOST) {
          context.fillStyle = color("paper");
          context.fillRect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset);
        }
      }
  }

  /** Draws thin lines where segments begin. */
  function paintBorders(context, { cell, left, top, wide, high }) {
    const [rows, keys] = plane.shape;
    const right = Math.min(left + (keys - originX) * cell, left + wide * cell);
    const bottom = Math.min(top + (rows - originY) * cell, top + high * cell);
    context.fillStyle = Drawing.mix("paper", "ink", 0.4);
    for (const { start, kind } of State.run.segments) {
      if (start === 0 || kind === "separator") continue; // it belongs to the segment before it
      const x = left + (start / masks.scale - originX) * cell;
      if (x > left && x < right) context.fillRect(x - 0.5, top, 1, bottom - top);
      const y = top + (firstRowFrom(start) / masks.scale - originY) * cell;
      if (y > top && y < bottom) context.fillRect(left, y - 0.5, right - left, 1);
    }
  }

  function firstRowFrom(position) {
    const found = masks.pos.findIndex((pos) => pos >= position);
    return found < 0 ? masks.pos.length : found;
  }

  /** Draws the row of the step, and the chosen cell. */
  function paintCursor(context, { cell, left, top, wide, keys }) {
    const at = cursor();
    if (!at) return;
    const length = Math.min(wide, keys - originX) * cell;
    const y = top + (at.row - originY) * cell, x = left + (at.key - originX) * cell;
    context.strokeStyle = color("ink");
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, y - 0.5, length - 1, Math.max(cell, 2) + 1);
    if (at.isChosen) {
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, Math.max(cell, 3) + 2, Math.max(cell, 3) + 2);
    }
  }

  /** Draws the segments along both axes, and the tokens where there is room. */
  function paintAxes(context, shape) {
    const { cell, left, top, wide, high, rows, keys, hasText } = shape;
    const right = Math.min(left + (keys - originX) * cell, shape.width);
    const bottom = Math.min(top + (rows - originY) * cell, shape.height);
    for (const { start, stop, color: number } of State.run.segments) {
      context.fillStyle = color(`seg-${number < 0 ? "none" : number % 8}`);
      const x = Math.max(left + (start / masks.scale - originX) * cell, left);
      const end = Math.min(left + (stop / masks.scale - originX) * cell, right);
      if (end > x) context.fillRect(x, top - 7, end - x, 4);
      const y = Math.max(top + (firstRowFrom(start) / masks.scale - originY) * cell, top);
      const below = Math.min(top + (firstRowFrom(stop) / masks.scale - originY) * cell, bottom);
      if (below > y) context.fillRect(left - 7, y, 4, below - y);
    }
    if (!hasText) return;
    context.fillStyle = color("muted");
    context.font = `${Math.min(cell * 0.72, 13)}px ${color("mono")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let row = Math.ceil(originY - 0.5); row < Math.min(originY + high - 0.2, rows); row++) {
      const y = top + (row + 0.5 - originY) * cell;
      if (y >= top) context.fillText(axisText(masks.pos[row], 13), left - 11, y);
    }
    context.textAlign = "left";
    for (let key = Math.ceil(originX - 0.5); key < Math.min(originX + wide - 0.2, keys); key++) {
      const x = left + (key + 0.5 - originX) * cell;
      if (x < left) continue;
      context.save();
      context.translate(x, top - 11);
      context.rotate(-Math.PI / 2);
      context.fillText(axisText(key, 9), 0, 0);
      context.restore();
    }
    context.textAlign = "start";
  }

  function axisText(pos, most) {
    const text = State.run.textAt(pos).trim() || String(pos);
    return text.length > most ? `${text.slice(0, most - 1)}…` : text;
  }

  // -- words --------------------------------------------------------------------------------------

  /** Writes a cell in words: row, key, open or closed, and why as far as it is known. */
  function describe(at) {
    words.textContent = at ? sentence(at.row, at.key) : "";
  }

  function sentence(row, key) {
    if (masks.scale > 1) return block(row, key);
    const run = State.run, pos = masks.pos[row];
    const state = plane[row * plane.shape[1] + key];
    const names = [`Row ${run.name(pos)}`, `key ${run.name(key)}`];
    return `${names[0]} ${relation(row, key, state, pos, names[1])}.`;
  }

  function stateOf(name, row, key) {
    return name in views.planes ? masks.planes[views.planes[name]][row * plane.shape[1] + key] : null;
  }

  function relation(row, key, state, pos, name) {
    const declared = stateOf("declared", row, key), difference = stateOf("difference", row, key);
    const sees = (isOpen) => `${isOpen ? "attends to" : "does not attend to"} ${name}`;
    const by = masks.spec ? `the declared mask (${masks.spec})` : "the declared mask";
    if (view === "received" && state !== UNKNOWN)
      return state === APPLIED ? `and ${name}: their block is partial, so the mask_mod decides`
        : `${sees(state === OPEN)}: their block is ${state === OPEN ? "full" : "not visited"}`;
    if (view === "declared")
      return `${state === OPEN ? "should attend to" : "should not attend to"} ${name}`
        + (state === OPEN ? ": intended open" : `: ${whyClosed(pos, key, declared)}`);
    if (state === UNKNOWN) return `and ${name}: the executed mask was not recorded here`;
    if (difference === LEAKED) return `${sees(true)}: leaked, ${by} closes it`;
    if (difference === LOST) return `${sees(false)}: lost, ${by} opens it`;
    if (state === OPEN) return `${sees(true)}: open${declared === OPEN ? ", as intended" : ""}`;
    if (declared === OPEN) return `${sees(false)}: closed, its key is no longer in the cache`;
    return `${sees(false)}: closed, ${whyClosed(pos, key, declared)}`;
  }

  function whyClosed(pos, key, declared) {
    if (key > pos) return "it comes later";
    if (declared === null) return "by the mask that the layer received";
    const own = paraphraseOf(pos), other = paraphraseOf(key);
    const by = `as ${masks.spec || "the declared mask"} intends`;
    return own >= 0 && other >= 0 && own !== other ? `another paraphrase, ${by}` : by;
  }

  function paraphraseOf(pos) {
    const { segments } = State.run, number = State.run.segmentAt(pos);
    const owner = number < 0 ? null : segments[segments[number].owner] ?? segments[number];
    return owner && owner.kind === "paraphrase" ? owner.start : -1;
  }

  function block(row, key) {
    const { scale, pos, n_keys: nKeys } = masks, state = plane[row * plane.shape[1] + key];
    const rows = `rows ${pos[row * scale]} to ${pos[Math.min((row + 1) * scale, pos.length) - 1]}`;
    const keys = `keys ${key * scale} to ${Math.min((key + 1) * scale, nKeys) - 1}`;
    const names = { 0: "all closed", [OPEN]: "all open", [UNKNOWN]: "not recorded",
      [LOST]: "some are lost", [LEAKED]: "some are leaked", [BOTH]: "some are lost and some leaked",
      [APPLIED]: "partial blocks, so the mask_mod decides" };
    return `The ${rows}, ${keys}: ${names[state] ?? `about ${Math.round((state - 0.5) * 20)} % are open`}.`;
  }

  function writeLegend() {
    const entries = {
      executed: [["open", "attended"], ["closed", "not attended"]],
      received: [["open", "full block"], ["between", "partial block, the mask_mod decides"],
        ["closed", "block not visited"]],
      declared: [["open", "intended open"], ["closed", "intended closed"]],
      difference: [["open", "open"], ["closed", "closed"],
        ["bad", "leaked: open, intended closed", "✖"], ["bad", "lost: closed, intended open", "□"]],
    }[view];
    if (masks.planes[views.planes[view]].includes(UNKNOWN)) entries.push(["unknown", "not recorded"]);
    Panels.legend(document.getElementById("mask-legend"), entries);
  }

  // -- pointer and keys ---------------------------------------------------------------------------

  let drag = null;
  const pointers = new Map();

  canvas.addEventListener("pointerdown", (event) => {
    if (!views) return;
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, originX, originY, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!views) return;
    if (pointers.size === 2 && pointers.has(event.pointerId)) return pinch(event);
    if (!drag) {
      hovered = cellAt(event.offsetX, event.offsetY);
      return describe(hovered ?? cursor());
    }
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    if (Math.hypot(dx, dy) > 4) drag.moved = true;
    if (drag.moved && zoom > 1) {
      const { cell } = layout();
      originX = drag.originX - dx / cell;
      originY = drag.originY - dy / cell;
      layout();
      paint();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    const at = drag && !drag.moved ? cellAt(event.offsetX, event.offsetY) : null;
    drag = null;
    if (at) choose(at.row, at.key);
  });
  canvas.addEventListener("pointercancel", (event) => {
    pointers.delete(event.pointerId);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    if (views) describe(cursor());
  });
  // The wheel zooms; once everything is visible, it scrolls the page again.
  canvas.addEventListener("wheel", (event) => {
    if (!views || (event.deltaY > 0 && zoom === 1)) return;
    event.preventDefault();
    zoomBy(Math.exp(-Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) * 0.004),
      event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoomBy(2, event.offsetX, event.offsetY));

  /** Zooms with two fingers. */
  function pinch(event) {
    const [other] = [...pointers.values()].filter((one) => one.pointerId !== event.pointerId);
    const old = pointers.get(event.pointerId);
    const distance = (one) => Math.hypot(one.offsetX - other.offsetX, one.offsetY - other.offsetY);
    const factor = distance(event) / Math.max(distance(old), 1);
    pointers.set(event.pointerId, event);
    if (drag) drag.moved = true;
    zoomBy(factor, (event.offsetX + other.offsetX) / 2, (event.offsetY + other.offsetY) / 2);
  }

  function choose(row, key) {
    const at = Math.min(row * masks.scale, masks.pos.length - 1);
    State.go({ q: masks.pos[at], k: Math.min(key * masks.scale, masks.n_keys - 1) });
  }

  /** Moves the cursor by rows and keys. */
  function moveCursor(rows, keys) {
    const at = views && cursor();
    if (!at) return;
    const [nRows, nKeys] = plane.shape;
    choose(Math.min(Math.max(at.row + rows, 0), nRows - 1), Math.min(Math.max(at.key + keys, 0), nKeys - 1));
  }

  document.getElementById("zoom-in").addEventListener("click", () => zoomBy(1.6));
  document.getElementById("zoom-out").addEventListener("click", () => zoomBy(1 / 1.6));
  document.getElementById("zoom-fit").addEventListener("click", () => {
    fit();
    paint();
  });
  document.getElementById("mask-difference").addEventListener("click", () => {
    const { row, key } = firstDifference();
    const scale = MAX_CELL / 2 / layout().fitted;
    if (zoom < scale) zoomBy(scale / zoom);
    choose(row, key);
  });

  return { draw, paint, zoomBy, nextView, moveCursor, canvas };
})();
