// Tokens: the text token by token, coloured by segment, probability or attention.

const Tokens = (() => {
  const { element, number, percent } = Drawing;
  const MAX_TOKENS = 3000; // of a longer text, those around the current token are shown
  const MIN_WEIGHT = 0.08; // of the heaviest token's; lighter tokens stay plain
  const MODES = [
    { value: "segment", label: "segment" },
    { value: "probability", label: "probability" },
    { value: "attention", label: "attention" },
  ];
  const box = document.getElementById("tokens"), words = document.getElementById("token-words");
  let mode = "segment", spans = new Map(), drawn = "";

  function draw(run, place) {
    document.getElementById("text").hidden = run.isTraining || !run.tokens.pos.length;
    if (run.isTraining) return;
    Drawing.choice(document.getElementById("colour"), MODES, mode, (value) => {
      mode = value;
      draw(State.run, State.place);
    });
    const current = run.scalar("pos", place.s) ?? -1;
    build(run, run.tokenIndex(current));
    weigh(run, place);
    for (const span of box.querySelectorAll(".current, .query")) {
      span.classList.remove("current", "query");
      span.removeAttribute("aria-current");
    }
    const now = spans.get(current), query = place.q === null ? null : spans.get(place.q);
    if (now) {
      now.classList.add("current");
      now.setAttribute("aria-current", "true");
      keepVisible(now);
    }
    if (query) query.classList.add("query");
    describe(run, place.q !== null ? place.q : current);
  }

  /** Makes the spans of the tokens, unless they are there already. */
  function build(run, current) {
    const n = run.tokens.pos.length, half = MAX_TOKENS / 2;
    const start = n <= MAX_TOKENS ? 0 : Math.max(0, Math.min(current - half, n - MAX_TOKENS));
    const stop = Math.min(start + MAX_TOKENS, n);
    const key = [run.generation.generation, run.branch.branch, start].join();
    if (key === drawn) return;
    drawn = key;
    spans = new Map();
    const parts = [];
    if (start) parts.push(element("span", "segment-label", `… ${start} earlier tokens`));
    let segment = null, isLineStart = true;
    for (let index = start; index < stop; index++) {
      const pos = run.tokens.pos[index], own = run.segmentAt(pos);
      if (own !== segment && own >= 0 && run.segments[own].kind !== "separator")
        parts.push(element("span", `segment-label${isLineStart ? " first" : ""}`, run.segments[own].label));
      segment = own;
      isLineStart = run.tokens.text[index].includes("↵");
      parts.push(token(run, index, own));
    }
    if (stop < n) parts.push(element("span", "segment-label", `… ${n - stop} later tokens`));
    box.replaceChildren(...parts);
  }

  function token(run, index, segment) {
    const pos = run.tokens.pos[index], text = run.tokens.text[index];
    const span = element("span", "token", text);
    if (text.includes("↵")) span.append("\n");
    const color = segment < 0 ? "none" : run.segments[segment].color;
    span.style.setProperty("--seg", `var(--seg-${color === "none" || color < 0 ? "none" : color % 8})`);
    span.classList.toggle("special", run.tokens.kind[index] === 1);
    span.classList.toggle("blank", run.tokens.kind[index] === 2);
    span.dataset.pos = pos;
    spans.set(pos, span);
    return span;
  }

  /** Sets the weight of each token in the modes that colour by a number. */
  function weigh(run, place) {
    box.classList.toggle("heat", mode !== "segment");
    if (mode === "segment") return;
    const weights = mode === "probability" ? uncertainties(run) : Attention.tokenWeights(run, place);
    const limits = weights ? Drawing.bounds(weights.values()) : null;
    const scale = mode === "attention" && limits && limits[1] > 0 ? 1 / Math.sqrt(limits[1]) : 1;
    for (const [pos, span] of spans) {
      const weight = weights?.get(pos) ?? 0;
      const shown = mode === "attention" ? Math.sqrt(weight) * scale : weight;
      span.style.setProperty("--weight", shown < MIN_WEIGHT ? 0 : shown.toFixed(3));
    }
  }

  function uncertainties(run) {
    const found = new Map();
    for (const step of run.steps) {
      const pos = run.scalar("pos", step), logprob = run.scalar("chosen_logprob", step);
      if (pos !== null && logprob !== null) found.set(pos, 1 - Math.exp(Math.min(logprob, 0)));
    }
    return found;
  }

  function keepVisible(span) {
    const top = span.offsetTop - box.offsetTop;
    if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40)
      box.scrollTop = top - box.clientHeight / 2;
  }

  /** Writes what is known of a token below the text. */
  function describe(run, pos) {
    const index = run.tokenIndex(pos);
    if (index < 0) {
      words.textContent = "";
      return;
    }
    const step = run.tokens.step[index], parts = [`Token ${run.name(pos)}, id ${run.tokens.id[index]}`];
    if (step >= 0) {
      const logprob = run.scalar("chosen_logprob", step), entropy = run.scalar("entropy", step);
      parts.push(`chosen by step ${step}`);
      if (logprob !== null) parts.push(`probability ${percent(Math.exp(logprob))}`);
      if (entropy !== null) parts.push(`entropy ${number(entropy)} nats`);
    }
    if (mode === "attention") {
      const weights = Attention.tokenWeights(run, State.place);
      parts.push(!weights ? Attention.whyNoTokens()
        : weights.has(pos) ? `attention ${percent(weights.get(pos))}` : "no key of this row");
    }
    words.textContent = `${parts.join(" · ")}${mode === "probability"
      ? " · deeper and thicker: less probable" : ""}`;
  }

  box.addEventListener("mouseover", (event) => {
    const pos = event.target.dataset?.pos;
    if (pos !== undefined) describe(State.run, Number(pos));
  });
  box.addEventListener("click", (event) => {
    const pos = Number(event.target.dataset?.pos ?? -1), index = State.run.tokenIndex(pos);
    if (index < 0) return;
    const step = State.run.tokens.step[index];
    // A token of the prompt has its own row of the mask.
    State.go(step >= 0 ? { s: step, q: null, k: null } : { q: pos, k: pos });
  });

  return { draw };
})();
