// Attention: the share of a segment for every layer and head, and the row of the chosen head.

const Attention = (() => {
  const { barTable, percent, number, mix } = Drawing;
  const N_HEAVIEST = 12;
  const ENTROPY = "entropy";
  const heads = document.getElementById("heads"), measure = document.getElementById("measure");
  let shown = null, chosen = null;

  function draw(run, place) {
    document.getElementById("attention").hidden = run.isTraining;
    if (run.isTraining) return;
    const found = run.at("attention", place.s), tokens = run.at("token_attention", place.s);
    const missing = document.getElementById("attention-missing");
    shown = found.row >= 0 ? found.columns : null;
    const row = tokens.row >= 0 ? tokenRow(tokens, place) : null;
    document.getElementById("attention-body").hidden = !shown && !row;
    measure.disabled = !shown;
    measure.closest("label").hidden = !shown;
    const reason = shown ? "" : whyMissing(found.columns, run.owner(place.s).missing.attention, place.s);
    missing.hidden = !reason;
    missing.replaceChildren(...(reason ? reason : []));
    document.getElementById("heads-title").hidden = !shown;
    heads.hidden = !shown;
    writeWords(run, place, found, tokens);
    if (shown) {
      listMeasures(run);
      drawHeads(found, place);
      drawSegments(run, found, place);
    } else {
      document.getElementById("segment-bars").replaceChildren();
      document.getElementById("heads-legend").textContent = "";
    }
    drawTokens(run, place, row);
  }

  /** Returns why a step has no attention, with a link to the nearest step that has. */
  function whyMissing(columns, reason, step) {
    if (!columns) return [reason ?? "Attention is not recorded at this level."];
    if (columns.every === 1) return [`Step ${step} has no recorded attention.`];
    const near = Array.from(columns.step).reduce((best, one) =>
      Math.abs(one - step) < Math.abs(best - step) ? one : best);
    const link = Drawing.element("a", "", `step ${near}`);
    link.href = State.address({ ...State.place, s: near });
    return [`To fit its size, this report has the attention of every ${Drawing.ordinal(columns.every)} step: see `,
      link, "."];
  }

  function whyNoTokens() {
    const { run, place } = State, { columns } = run.at("token_attention", place.s);
    const text = whyMissing(columns, run.owner(place.s).missing.token_attention, place.s);
    return text.map((part) => part.textContent ?? part).join("");
  }

  function writeWords(run, place, found, tokens) {
    const pos = run.scalar("kv_after", place.s) - 1, next = run.textAt(run.scalar("pos", place.s) ?? -1);
    const parts = [`The newest row of step ${place.s}, ${run.name(pos)}`
      + `${next ? `, which predicted “${next.trim() || next}”` : ""}: layer ${place.layer}, head ${place.head}.`];
    const paths = run.at("paths", place.s);
    const column = paths.columns ? paths.columns.layers.indexOf(place.layer) : -1;
    if (paths.row >= 0 && column >= 0) {
      const at = paths.row * paths.columns.layers.length + column, check = paths.columns.check[at];
      parts.push(paths.columns.failed[at] ? `The check failed (error ${number(check)}): this is not what ran.`
        : Number.isNaN(check) ? "It was not checked against the kernel."
          : `Verified against the kernel: error ${number(check)}.`);
    }
    document.getElementById("attention-words").textContent =
      found.row >= 0 || tokens.row >= 0 ? parts.join(" ") : "";
  }

  // -- every layer and head -----------------------------------------------------------------------

  function listMeasures(run) {
    const labels = [...shown.labels.map((label, index) => ({ label, value: String(index) })),
      { label: "entropy, in nats", value: ENTROPY }];
    const first = run.segments.findIndex(({ kind }) => kind === "paraphrase");
    const known = labels.some(({ value }) => value === chosen);
    if (!known) chosen = String(Math.max(first, 0) < shown.labels.length ? Math.max(first, 0) : 0);
    measure.replaceChildren(...labels.map(({ label, value }) => new Option(label, value, false, value === chosen)));
    measure.value = chosen;
  }

  function valueAt({ columns, row }, layer, head) {
    const [, nLayers, nHeads, nSegments] = columns.share.shape;
    const at = (row * nLayers + layer) * nHeads + head;
    return chosen === ENTROPY ? columns.entropy[at]
      : columns.share[at * nSegments + Number(chosen)] / 65535;
  }

  function drawHeads(found, place) {
    const { columns, row } = found, [, nLayers, nHeads] = columns.share.shape;
    const values = [];
    for (let layer = 0; layer < nLayers; layer++)
      for (let head = 0; head < nHeads; head++) values.push(valueAt(found, layer, head));
    const top = chosen === ENTROPY ? (Drawing.bounds(values)?.[1] || 1) : 1;
    const failed = (layer) => columns.failed[row * nLayers + layer];
    Drawing.grid(heads, {
      rows: columns.layers,
      columns: Array.from({ length: nHeads }, (_, head) => head),
      current: { row: columns.layers.indexOf(place.layer), column: Math.min(place.head, nHeads - 1) },
      fill: (layer, head) => {
        const value = values[layer * nHeads + head];
        if (failed(layer)) return { color: mix("paper", "ink", 0.12), text: "?" };
        if (!Number.isFinite(value)) return { color: mix("paper", "ink", 0.05), text: "–" };
        return { color: mix("closed", "open", Math.sqrt(value / top)) };
      },
    });
    const value = valueAt(found, Math.max(columns.layers.indexOf(place.layer), 0),
      Math.min(place.head, nHeads - 1));
    const name = chosen === ENTROPY ? `${number(value)} nats` : percent(value);
    document.getElementById("heads-legend").textContent =
      `Layers down, heads across; a stronger colour is more. Layer ${place.layer}, `
      + `head ${place.head}: ${name}.${values.some((_, i) => failed(Math.floor(i / nHeads)))
        ? " ? marks layers whose check failed." : ""}`;
  }

  // -- the row of one head ------------------------------------------------------------------------

  function drawSegments(run, { columns, row }, place) {
    const [, nLayers, nHeads, nSegments] = columns.share.shape;
    const layer = columns.layers.indexOf(place.layer), box = document.getElementById("segment-bars");
    if (layer < 0 || columns.failed[row * nLayers + layer]) {
      box.replaceChildren(Drawing.element("p", "missing", layer < 0
        ? `Layer ${place.layer} has no recorded attention.`
        : "The check of this layer failed, so its attention is not what ran and is not shown."));
      return;
    }
    const start = ((row * nLayers + layer) * nHeads + Math.min(place.head, nHeads - 1)) * nSegments;
    const rows = columns.labels.map((label, index) => {
      const share = columns.share[start + index] / 65535, segment = run.segments[index];
      const isKnown = segment && run.segments.length === nSegments;
      const seg = isKnown ? (segment.color < 0 ? "seg-none" : `seg-${segment.color % 8}`) : "open";
      return { cells: [label, percent(share)], share, color: seg };
    });
    box.replaceChildren(barTable("By segment", null, rows));
  }

  /** Returns the shares of a row by position, null if the layer's check failed. */
  function tokenRow({ columns, row }, place) {
    const layer = columns.layers.indexOf(place.layer), shares = columns.share[row];
    if (layer < 0 || columns.failed[row * columns.layers.length + layer]) return null;
    const [, nHeads, nKeys] = shares.shape;
    const start = (layer * nHeads + Math.min(place.head, nHeads - 1)) * nKeys;
    return { first: columns.first_pos[row], shares: shares.subarray(start, start + nKeys) };
  }

  /** Returns the attention of the chosen head by position, null if it is not recorded. */
  function tokenWeights(run, place) {
    const found = run.at("token_attention", place.s);
    const row = found.row >= 0 ? tokenRow(found, place) : null;
    return row && new Map(Array.from(row.shares, (share, key) => [row.first + key, share / 65535]));
  }

  function drawTokens(run, place, row) {
    const box = document.getElementById("token-bars");
    if (!row) {
      const found = run.at("token_attention", place.s);
      const layers = found.columns?.layers ?? [];
      const text = found.row >= 0 && !layers.includes(place.layer)
        ? [`By token, the layers ${layers.join(", ")} are recorded.`]
        : found.row >= 0 ? ["The recomputed weights of this layer are not what ran, so they are not shown."]
          : whyMissing(found.columns, run.owner(place.s).missing.token_attention, place.s);
      box.replaceChildren(Drawing.element("p", "missing", ...text));
      return;
    }
    const order = Array.from(row.shares.keys()).filter((key) => row.shares[key] > 0)
      .sort((a, b) => row.shares[b] - row.shares[a] || a - b).slice(0, N_HEAVIEST);
    const most = row.shares[order[0]] || 1;
    const rows = order.map((key) => {
      const segment = run.segmentAt(row.first + key);
      const seg = segment < 0 || run.segments[segment].color < 0 ? "none" : run.segments[segment].color % 8;
      return { cells: [run.name(row.first + key, false), percent(row.shares[key] / 65535)],
        share: row.shares[key] / most, color: `seg-${seg}` };
    });
    box.replaceChildren(barTable(order.length ? "The heaviest tokens" : "This row attends to no key", null, rows));
  }

  measure.addEventListener("change", () => {
    chosen = measure.value;
    draw(State.run, State.place);
  });
  heads.addEventListener("click", (event) => {
    const at = heads.gridAt?.(event.offsetX, event.offsetY);
    if (at && shown) State.go({ layer: shown.layers[at.row], head: at.column });
  });

  function nextMeasure() {
    if (measure.disabled) return;
    measure.selectedIndex = (measure.selectedIndex + 1) % measure.options.length;
    chosen = measure.value;
    draw(State.run, State.place);
  }

  return { draw, tokenWeights, whyNoTokens, nextMeasure };
})();
