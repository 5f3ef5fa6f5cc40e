// Panels: the next token, the kernel path, memory, and training.

const Panels = (() => {
  const { element, barTable, number, percent, bytes, color } = Drawing;
  const byId = (id) => document.getElementById(id);

  /** Writes a legend of [colour, text, sign] entries. */
  function legend(box, entries) {
    box.replaceChildren(...entries.flatMap(([name, text, sign = ""]) => {
      const swatch = element("span", "swatch", sign);
      swatch.style.background = `var(--${name})`;
      swatch.style.color = "var(--paper)";
      return [swatch, text];
    }));
  }

  // -- the next token -----------------------------------------------------------------------------

  function drawLogits(run, place) {
    byId("logits").hidden = run.isTraining;
    if (run.isTraining) return;
    const { columns, row } = run.at("candidates", place.s), missing = byId("logits-missing");
    const nearest = columns && columns.every > 1;
    missing.hidden = row >= 0;
    missing.textContent = row >= 0 ? "" : !columns
      ? run.owner(place.s).missing.candidates ?? "No logits are recorded for this step."
      : nearest ? `To fit its size, this report lists the likely tokens of every ${Drawing.ordinal(columns.every)} step.`
        : `No likely tokens are recorded at step ${place.s}.`;
    byId("logits-body").replaceChildren(...(row >= 0 ? [choiceSentence(run, place),
      candidates(run, place, columns, row)] : []));
    drawSeries(run, place, "entropy", "entropy-title", "entropy-chart", "Entropy", "nats");
    drawSeries(run, place, "margin", "margin-title", "margin-chart", "Margin", "best logit minus second best");
  }

  function choiceSentence(run, place) {
    const rank = run.scalar("chosen_rank", place.s), logprob = run.scalar("chosen_logprob", place.s);
    const text = run.textAt(run.scalar("pos", place.s) ?? -1);
    const how = rank === null || rank < 0 ? "" : rank === 0 ? ", the most likely token" : `, rank ${rank + 1}`;
    const chance = logprob === null ? "" : `, with probability ${percent(Math.exp(logprob))}`;
    return element("p", "", text ? `Step ${place.s} chose “${text.trim() || text}”${how}${chance}.`
      : `The token that step ${place.s} chose is not known.`);
  }

  function candidates(run, place, columns, row) {
    const width = columns.id.shape[1], chosen = run.scalar("chosen_id", place.s);
    const indices = Array.from({ length: width }, (_, rank) => row * width + rank)
      .filter((at) => columns.id[at] >= 0);
    const isChanged = indices.some((at) => columns.score_logprob[at] === -Infinity
      || Math.abs(columns.score_logprob[at] - columns.logprob[at]) > 1e-4);
    const rows = indices.map((at) => {
      const id = columns.id[at], share = Math.exp(columns.logprob[at]), after = columns.score_logprob[at];
      const text = `${id === chosen ? "● " : ""}${columns.text[id] ?? `id ${id}`}`;
      const cells = [text, percent(share)];
      if (isChanged) cells.push(after === -Infinity ? "filtered" : percent(Math.exp(after)));
      return { cells, share, chosen: id === chosen };
    });
    const header = isChanged ? ["token", "probability", "after sampling"] : ["token", "probability"];
    return barTable("The most likely tokens; ● is the chosen one", header, rows);
  }

  function drawSeries(run, place, name, titleId, canvasId, label, unit) {
    const values = run.steps.map((step) => run.scalar(name, step) ?? undefined);
    const limits = Drawing.bounds(values), value = run.scalar(name, place.s);
    byId(titleId).parentElement.hidden = !limits;
    if (!limits) return;
    byId(titleId).replaceChildren(`${label} `, element("b", "", number(value)),
      ` ${unit} · ${number(limits[0])} to ${number(limits[1])} in this run`);
    Drawing.line(byId(canvasId), values, run.indexOf(place.s));
  }

  // -- kernel path --------------------------------------------------------------------------------

  const LETTERS = ["F", "C", "S", "E", "?", "-"];
  const PATH_COLORS = ["seg-0", "seg-2", "seg-6", "seg-3", "seg-none", "seg-none"];
  const UNKNOWN_PATH = "unknown";
  const MAX_COLUMNS = 160;
  let pathSteps = [];

  function drawPath(run, place) {
    byId("path").hidden = run.isTraining;
    if (run.isTraining) return;
    const { columns, row } = run.at("paths", place.s), canvas = byId("path-canvas");
    byId("path-missing").hidden = Boolean(columns);
    canvas.hidden = !columns;
    if (!columns) {
      byId("path-missing").textContent = run.contents.missing.paths ?? "No attention call is recorded.";
      return;
    }
    const middle = run.indexOf(place.s), half = MAX_COLUMNS / 2;
    const start = Math.max(0, Math.min(middle - half, run.steps.length - MAX_COLUMNS));
    pathSteps = run.steps.slice(start, start + MAX_COLUMNS);
    const used = new Set();
    const code = (step, layer) => {
      const found = run.at("paths", step);
      return found.row < 0 ? 255 : found.columns.path[found.row * found.columns.layers.length + layer];
    };
    Drawing.grid(canvas, {
      rows: columns.layers,
      columns: pathSteps,
      maxCell: 18,
      current: { row: columns.layers.indexOf(place.layer), column: pathSteps.indexOf(place.s) },
      fill: (layer, index) => {
        const path = code(pathSteps[index], layer);
        if (path === 255) return null;
        used.add(path);
        return { color: Drawing.mix("paper", PATH_COLORS[path], 0.62), text: LETTERS[path] };
      },
    });
    canvas.dataset.layers = columns.layers.join();
    byId("path-legend").textContent = "Layers down, steps across. "
      + [...used].sort().map((path) => `${LETTERS[path]} ${pathName(columns, path)}`).join(", ")
      + (start > 0 || run.steps.length > MAX_COLUMNS
        ? `. Steps ${pathSteps[0]} to ${pathSteps[pathSteps.length - 1]} of ${run.last}.` : ".");
    byId("path-words").textContent = row < 0 ? `No call is recorded at step ${place.s}.`
      : pathWords(columns, row, place);
  }

  function pathName(columns, path) {
    return columns.names[path] === UNKNOWN_PATH ? "kernel not recorded" : columns.names[path];
  }

  function pathWords(columns, row, place) {
    const n = columns.layers.length, layer = columns.layers.indexOf(place.layer);
    const path = columns.path[row * n + layer], check = columns.check[row * n + layer];
    const own = path === 255 || layer < 0 ? "has no recorded call"
      : columns.names[path] === UNKNOWN_PATH ? "ran a kernel that is not recorded"
        : `ran ${columns.names[path]}`;
    const checked = Number.isNaN(check) ? "" : columns.failed[row * n + layer]
      ? `; its check failed (error ${number(check)})` : `; its check: error ${number(check)}`;
    const notes = columns.notes[place.s] ?? [];
    return [`At step ${place.s}, layer ${place.layer} ${own}${checked}.`, ...notes].join(" ");
  }

  byId("path-canvas").addEventListener("click", (event) => {
    const at = byId("path-canvas").gridAt?.(event.offsetX, event.offsetY);
    const layers = byId("path-canvas").dataset.layers.split(",").map(Number);
    if (at) State.go({ s: pathSteps[at.column], layer: layers[at.row] });
  });

  // -- memory -------------------------------------------------------------------------------------

  function drawMemory(run, place) {
    const names = Object.keys(run.contents.memory?.figures ?? {})
      .filter((name) => !(run.isTraining && name === "KV cache"));
    byId("memory-missing").hidden = names.length > 0;
    byId("memory-missing").textContent = names.length ? "" : run.contents.missing.memory ?? "No memory is recorded.";
    const charts = names.map((name) => memoryChart(run, place, name));
    byId("memory-body").replaceChildren(...charts.map(({ box }) => box));
    for (const { draw } of charts) draw();
  }

  /** Makes the chart of a figure; one that never changes is a line of text. */
  function memoryChart(run, place, name) {
    const values = run.steps.map((step) => {
      const { columns, row } = run.at("memory", step);
      const value = row < 0 ? NaN : columns.figures[name]?.[row];
      return Number.isFinite(value) ? value : undefined;
    });
    const at = run.indexOf(place.s), limits = Drawing.bounds(values);
    const title = element("p", "chart-title", `${name} `, element("b", "", bytes(values[at])));
    const box = element("div", "chart", title);
    if (!limits || limits[0] === limits[1]) return { box, draw() {} };
    const growth = at > 0 ? values[at] - values[at - 1] : NaN;
    const sign = growth > 0 ? "+" : growth < 0 ? "−" : "";
    title.append(Number.isFinite(growth) ? ` · ${sign}${bytes(Math.abs(growth))} since the step before` : "");
    title.append(` · ${bytes(limits[0])} to ${bytes(limits[1])}`);
    const canvas = element("canvas", "small");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name} by step`);
    box.append(canvas);
    Drawing.onPick(canvas, pickStep);
    return { box, draw: () => Drawing.line(canvas, values, at) };
  }

  function pickStep(index) {
    const { steps } = State.run;
    State.go({ s: steps[Math.min(Math.max(index, 0), steps.length - 1)], q: null, k: null });
  }

  // -- training -----------------------------------------------------------------------------------

  const CURVES = [["loss", "Loss"], ["norm", "Gradient norm"], ["rate", "Learning rate"]];
  const BAD = ["", "the loss is not finite", "a gradient is not finite", "loss and gradient are not finite"];

  function drawTraining(run, place) {
    byId("training").hidden = !run.isTraining;
    if (!run.isTraining) return;
    const { columns, row } = run.at("training", place.s), parts = [];
    if (row >= 0 && columns.bad[row]) parts.push(element("p", "missing", `At step ${place.s}, ${BAD[columns.bad[row]]}.`));
    const drawings = [];
    for (const [name, title] of CURVES) {
      const values = Array.from(columns[name]), limits = Drawing.bounds(values);
      if (!limits) continue;
      if (limits[0] === limits[1] && !columns.bad.includes(1)) {
        parts.push(element("p", "chart-title", `${title} `, element("b", "", number(limits[0])), " at every step"));
        continue;
      }
      const isLog = limits[0] > 0 && limits[1] / limits[0] > 1000;
      const heading = element("p", "chart-title", `${title} `, element("b", "", number(values[row])),
        ` · ${number(limits[0])} to ${number(limits[1])}${isLog ? ", logarithmic" : ""}`);
      const canvas = element("canvas", "small");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${title} by step`);
      Drawing.onPick(canvas, pickStep);
      parts.push(element("div", "chart", heading, canvas));
      drawings.push(() => Drawing.line(canvas, values, row, { log: isLog }));
    }
    if (columns.groups.length) {
      const grid = element("canvas");
      grid.setAttribute("role", "img");
      grid.setAttribute("aria-label", "Gradient norm of every group of parameters, down, by step, across");
      const words = element("p", "legend");
      parts.push(element("div", "chart", element("p", "chart-title", "Gradient norm by group"), grid, words));
      drawings.push(() => drawGroups(columns, row, grid, words));
    }
    if (columns.facts[row]) parts.push(factList(columns.facts[row]));
    byId("training-body").replaceChildren(...parts);
    for (const draw of drawings) draw();
  }

  function factList(facts) {
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("dt", "", name), element("dd", "", value));
    return list;
  }

  function drawGroups(columns, row, canvas, words) {
    const [nPoints, nGroups] = columns.group_norm.shape, norms = columns.group_norm;
    const logs = Array.from(norms, (norm) => (norm > 0 ? Math.log10(norm) : NaN));
    const [low, high] = Drawing.bounds(logs) ?? [0, 1];
    Drawing.grid(canvas, {
      rows: Array.from({ length: nGroups }, (_, group) => group),
      columns: Array.from(columns.step),
      maxCell: 18,
      current: { row: -1, column: row },
      fill: (group, point) => {
        const norm = norms[point * nGroups + group];
        if (Number.isNaN(norm)) return { color: color("unknown"), text: "!" };
        if (norm === 0) return { color: color("closed"), text: "0" };
        return { color: Drawing.mix("closed", "open", 0.1 + 0.9 * (logs[point * nGroups + group] - low) / (high - low || 1)) };
      },
    });
    const own = columns.groups.map((name, group) => `row ${group} ${name}: ${number(norms[row * nGroups + group])}`);
    words.textContent = `Groups down, steps across, on a logarithmic scale; ! is not finite or not recorded. At this step: `
      + `${own.slice(0, 24).join(", ")}${own.length > 24 ? ", …" : ""}.`;
    canvas.onclick = (event) => {
      const at = canvas.gridAt?.(event.offsetX, event.offsetY);
      if (at && at.column < nPoints) pickStep(at.column);
    };
  }

  for (const id of ["entropy-chart", "margin-chart"]) Drawing.onPick(byId(id), pickStep);

  return {
    legend,
    pickStep,
    draw(run, place) {
      drawLogits(run, place);
      drawPath(run, place);
      drawMemory(run, place);
      drawTraining(run, place);
    },
  };
})();
