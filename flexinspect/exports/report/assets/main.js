// Main: the controls, the timeline, the findings of the place, the keys, and the theme.

(() => {
  const byId = (id) => document.getElementById(id);
  const { element, number } = Drawing;
  const { head } = Data;
  const REPLAY_MS = 450;

  // -- controls -----------------------------------------------------------------------------------

  function fillSelect(select, options, chosen) {
    const shown = JSON.stringify(options);
    if (select.dataset.shown !== shown) {
      select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
      select.dataset.shown = shown;
    }
    select.value = chosen;
    select.closest("label").hidden = options.length < 2;
  }

  function answerLabel(generation, index) {
    const text = generation.branches[0]?.answer.replace(/\s+/g, " ").trim() || generation.sample_id;
    const short = text.length > 28 ? `${text.slice(0, 27)}…` : text;
    return `${index + 1} of ${head.generations.length}${short ? ` · ${short}` : ""}`;
  }

  function branchLabel({ branch, parent, fork_step: fork, change }) {
    return parent === null ? `${branch}` : `${branch} · from step ${fork} of ${parent}${change ? `: ${change}` : ""}`;
  }

  function drawControls(run, place) {
    fillSelect(byId("generation"), head.generations.map((one, index) =>
      [one.generation, answerLabel(one, index)]), place.g);
    fillSelect(byId("branch"), run.generation.branches.map((one) => [one.branch, branchLabel(one)]), place.b);
    fillSelect(byId("layer"), run.isTraining ? [] : run.layers().map((layer) => [layer, layer]), place.layer);
    const heads = Array.from({ length: run.isTraining ? 0 : run.nHeads() }, (_, n) => [n, n]);
    fillSelect(byId("head"), heads, place.head);
    byId("step").value = place.s;
    byId("step").max = run.last;
    byId("previous").disabled = place.s === run.first;
    byId("next").disabled = place.s === run.last;
    drawWhere(run, place);
  }

  function drawWhere(run, place) {
    const at = run.indexOf(place.s), n = run.steps.length, line = byId("where");
    if (!n) {
      line.textContent = "No step of this generation is recorded.";
      return;
    }
    if (run.isTraining) {
      line.textContent = `Training step ${place.s} (${at + 1} of ${n})`;
      return;
    }
    const text = run.textAt(run.scalar("pos", place.s) ?? -1);
    const { columns, row } = run.at("steps", place.s);
    const time = run.scalar("wall_ms", place.s), capture = run.scalar("capture_ms", place.s);
    const facts = [`${text ? "token" : "step"} ${at + 1} of ${n}`, `step ${place.s}${row >= 0 ? `, ${columns.phase[row]}` : ""}`];
    const kept = run.scalar("kv_after", place.s);
    if (kept !== null) facts.push(`${kept} keys in the cache`);
    if (time !== null) facts.push(`${number(time)} ms${capture === null ? "" : `, ${number(capture)} ms of it capture`}`);
    line.replaceChildren(element("span", "chosen", text ? `“${text.replace(/^ /, "·")}”` : "(token not known)"), ` · ${facts.join(" · ")}`);
  }

  const toNumber = (event) => Number(event.target.value);
  byId("generation").addEventListener("change", (event) => State.go({ g: toNumber(event), b: 0, s: 0 }, { jump: true }));
  byId("branch").addEventListener("change", (event) => {
    const branch = toNumber(event);
    const { fork_step: fork } = State.run.generation.branches.find((one) => one.branch === branch);
    State.go({ b: branch, s: fork ?? 0 }, { jump: true });
  });
  byId("step").addEventListener("change", (event) => goTo(toNumber(event)));
  byId("layer").addEventListener("change", (event) => State.go({ layer: toNumber(event) }));
  byId("head").addEventListener("change", (event) => State.go({ head: toNumber(event) }));
  byId("previous").addEventListener("click", () => stepBy(-1));
  byId("next").addEventListener("click", () => stepBy(1));
  byId("replay").addEventListener("click", () => replay());

  // -- moving -------------------------------------------------------------------------------------

  function goTo(step) {
    return State.go({ s: step, q: null, k: null });
  }

  function stepBy(n) {
    const { run, place } = State;
    const index = Math.min(Math.max(run.indexOf(place.s) + n, 0), run.steps.length - 1);
    return goTo(run.steps[index] ?? 0);
  }

  function layerBy(n) {
    const layers = State.run.layers(), at = layers.indexOf(State.place.layer);
    State.go({ layer: layers[Math.min(Math.max(at + n, 0), layers.length - 1)] });
  }

  function generationBy(n) {
    const numbers = head.generations.map((one) => one.generation);
    const at = numbers.indexOf(State.place.g) + n;
    if (numbers[at] !== undefined) State.go({ g: numbers[at], b: 0, s: 0 }, { jump: true });
  }

  let timer = null;
  function replay(stop = timer !== null) {
    if (timer !== null) clearInterval(timer);
    timer = stop ? null : setInterval(() => {
      if (State.place.s === State.run.last) replay(true);
      else stepBy(1);
    }, REPLAY_MS);
    byId("replay").setAttribute("aria-pressed", String(timer !== null));
    byId("replay").textContent = timer === null ? "Replay" : "Stop";
  }

  // -- the timeline -------------------------------------------------------------------------------

  const timeline = byId("timeline");

  function drawTimeline(run, place) {
    const name = run.isTraining ? "loss" : "entropy", marks = new Map();
    const values = run.isTraining
      ? run.steps.map((step) => { const { columns, row } = run.at("training", step); return row < 0 ? undefined : columns.loss[row]; })
      : run.steps.map((step) => run.scalar("entropy", step) ?? undefined);
    const order = ["error", "warning", "note"];
    for (const finding of findingsOf(run)) {
      if (finding.s === null) continue;
      const index = run.indexOf(finding.s), before = marks.get(index);
      if (!before || order.indexOf(finding.severity) < order.indexOf(before)) marks.set(index, finding.severity);
    }
    Drawing.bars(timeline, values, run.indexOf(place.s), { marks });
    const limits = Drawing.bounds(values);
    timeline.setAttribute("aria-valuemin", run.first);
    timeline.setAttribute("aria-valuemax", run.last);
    timeline.setAttribute("aria-valuenow", place.s);
    timeline.setAttribute("aria-valuetext", byId("where").textContent);
    byId("timeline-legend").textContent = (limits
      ? `A bar is a step; its height is the ${name}${run.isTraining ? "" : " of the choice"}, ${number(limits[0])} to ${number(limits[1])}${run.isTraining ? "" : " nats"}.`
      : "A bar is a step.") + (marks.size ? " ✖ error, ▲ warning, ● note." : "");
  }

  Drawing.onPick(timeline, Panels.pickStep);

  // -- findings -----------------------------------------------------------------------------------

  /** Returns the findings of a branch, and those of its parents before the forks. */
  function findingsOf(run) {
    return head.findings.filter((one) => one.g === run.generation.generation && run.includes(one.b, one.s));
  }

  function drawHere(run, place) {
    const here = findingsOf(run).filter((one) => one.s !== null && one.s <= place.s && place.s <= (one.last ?? one.s));
    const unique = here.filter((one, index) => here.findIndex((other) => other.kind === one.kind) === index);
    byId("here").replaceChildren(...unique.slice(0, 6).map((one) => {
      const link = element("a", "", "all of it");
      link.href = `#finding-${one.kind}`;
      return element("p", one.severity, `${Drawing.SIGNS[one.severity]} ${one.sentence} `, link);
    }));
  }

  const orderOf = (one) => [one.g, one.b, one.s ?? -1, one.layer ?? -1, one.head ?? -1];

  function compare(one, other) {
    const a = orderOf(one), b = orderOf(other);
    return a.map((part, i) => part - b[i]).find((difference) => difference !== 0) ?? 0;
  }

  function isAt(finding, place) {
    return finding.g === place.g && finding.b === place.b && (finding.s === null || finding.s === place.s);
  }

  /** Goes to the next (1) or previous (-1) finding in the order of their places, cyclically. */
  function findingBy(n) {
    const { place } = State, all = [...head.findings].sort(compare);
    if (!all.length) return;
    let at = all.findIndex((one) => one.number === place.finding && isAt(one, place));
    if (at >= 0) at += n;
    else if (n > 0) at = Math.max(all.findIndex((one) => compare(one, place) > 0), 0);
    else at = all.filter((one) => compare(one, place) < 0).length - 1;
    const next = all[(at + all.length) % all.length];
    State.go({ ...placeOf(next), finding: next.number }, { jump: true });
  }

  function placeOf({ g, b, s, layer, head: own, q }) {
    const found = { g, b, q: q ?? null, k: q ?? null };
    if (s !== null) found.s = s;
    if (layer !== null) found.layer = layer;
    if (own !== null) found.head = own;
    return found;
  }

  // -- keys ---------------------------------------------------------------------------------------

  const ACTIONS = {
    "step.next": () => stepBy(1),
    "step.previous": () => stepBy(-1),
    "step.first": () => goTo(State.run.first),
    "step.last": () => goTo(State.run.last),
    "step.ten_forward": () => stepBy(10),
    "step.ten_back": () => stepBy(-10),
    "step.goto": () => { byId("step").focus(); byId("step").select(); },
    "step.replay": () => replay(),
    "place.back": () => history.back(),
    "generation.next": () => generationBy(1),
    "generation.previous": () => generationBy(-1),
    "layer.next": () => layerBy(1),
    "layer.previous": () => layerBy(-1),
    "head.next": () => State.go({ head: State.place.head + 1 }),
    "head.previous": () => State.go({ head: State.place.head - 1 }),
    "finding.next": () => findingBy(1),
    "finding.previous": () => findingBy(-1),
    "branch.choose": () => byId("branch").focus(),
    "zoom.in": () => Mask.zoomBy(1.6),
    "zoom.out": () => Mask.zoomBy(1 / 1.6),
    "view.flip": () => Mask.nextView(),
    "view.measure": () => Attention.nextMeasure(),
    "cursor.left": () => Mask.moveCursor(0, -1),
    "cursor.right": () => Mask.moveCursor(0, 1),
    "cursor.up": () => Mask.moveCursor(-1, 0),
    "cursor.down": () => Mask.moveCursor(1, 0),
    "app.theme": () => nextTheme(),
    "app.help": () => byId("key-help").showModal(),
  };
  const IN_MASK = {
    ArrowLeft: "cursor.left", ArrowRight: "cursor.right", ArrowUp: "cursor.up", ArrowDown: "cursor.down",
    "+": "zoom.in", "-": "zoom.out", "=": "zoom.in",
  };
  // These scroll the page until the reader has gone into the explorer.
  const SCROLLING = ["ArrowUp", "ArrowDown", "PageUp", "PageDown"];

  function actionOf(event) {
    const key = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
    if (document.activeElement === Mask.canvas && IN_MASK[key]) return IN_MASK[key];
    const isInside = byId("explorer").contains(document.activeElement);
    if (SCROLLING.includes(key) && !isInside) return null;
    if (key === "+" || key === "-") return IN_MASK[key];
    return head.keys[key] ?? null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !State.run || byId("key-help").open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Enter" && event.target === byId("step")) event.target.blur();
      return;
    }
    const isButton = event.target.closest("button, a, summary") && ["Enter", " "].includes(event.key);
    const action = isButton ? null : ACTIONS[actionOf(event)];
    if (!action) return;
    event.preventDefault();
    if (State.run.steps.length) action();
  });

  // -- theme, size, print -------------------------------------------------------------------------

  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : systemIsDark.matches;
  }

  function setTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    drawAll();
  }

  function nextTheme() {
    setTheme(isDark() ? "light" : "dark");
  }

  function drawAll() {
    const { run, place } = State;
    if (!run) return;
    drawControls(run, place);
    drawTimeline(run, place);
    drawHere(run, place);
    Tokens.draw(run, place);
    Mask.draw(run, place);
    Attention.draw(run, place);
    Panels.draw(run, place);
  }

  byId("theme").addEventListener("click", nextTheme);
  byId("keys").addEventListener("click", () => byId("key-help").showModal());
  systemIsDark.addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
  let frame = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(drawAll);
  });
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme ?? "";
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.closed = "";
    }
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) {
      details.open = false;
      delete details.dataset.closed;
    }
    setTheme(before);
  });

  // -- start --------------------------------------------------------------------------------------

  State.onChange(drawAll);
  addEventListener("hashchange", () => {
    const wanted = State.readAddress();
    if (Object.keys(wanted).length) State.go({ q: null, k: null, ...wanted });
  });

  async function start() {
    document.documentElement.classList.add("scripted");
    setTheme("");
    if (!head.generations.some((one) => one.branches.length)) {
      document.documentElement.dataset.ready = "true";
      return;
    }
    byId("explorer").hidden = false;
    const wanted = State.readAddress(), worst = head.findings[0];
    const first = { g: head.generations[0].generation, b: 0 };
    const hasPlace = Object.keys(wanted).length > 0;
    try {
      await State.go(hasPlace ? { ...first, ...wanted } : worst ? { ...first, ...placeOf(worst), finding: worst.number } : first);
    } catch (error) {
      byId("explorer").replaceChildren(element("p", "missing",
        `The steps cannot be shown: ${error.message}`));
    }
    document.documentElement.dataset.ready = "true";
    if (hasPlace) byId("explorer").scrollIntoView();
  }

  // A link to a place scrolls to the explorer, because its address names no element.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#g=']");
    if (link) byId("explorer").scrollIntoView();
  });

  start();
})();
