// State: the place that is shown, its address, and the run (a branch with its parents) at it.
//
// A place has g (generation), b (branch), s (step), layer and head, and the cell q (position of the
// row) and k (position of the key) of the mask, null for none. The address after # has the same
// names, so that a link leads to the place.

const State = (() => {
  const NAMES = ["g", "b", "s", "layer", "head", "q", "k"];
  const listeners = [];
  let place = { g: 0, b: 0, s: 0, layer: 0, head: 0, q: null, k: null };
  let run = null;

  // -- runs ---------------------------------------------------------------------------------------

  /** A branch and its parents as one run of steps: step numbers map to contents and row. */
  class Run {
    constructor(generation, branch, family) {
      this.generation = generation;
      this.branch = branch;
      const own = family[0].contents;
      this.tokens = own.tokens;
      this.segments = own.segments;
      this.contents = own;
      this.isTraining = Boolean(own.training);
      this._owners = [];
      let stop = Infinity;
      for (const { branch: number, contents, fork } of family) {
        this._owners.push({ branch: number, contents, start: fork, stop });
        stop = fork;
      }
      this.steps = [];
      for (const { contents, start, stop: end } of [...this._owners].reverse())
        for (const step of contents.training ? contents.training.step : contents.steps.step)
          if (step >= start && step < end) this.steps.push(step);
      this._index = new Map(this.steps.map((step, index) => [step, index]));
      this._tokenAt = new Map(Array.from(own.tokens.pos, (pos, index) => [pos, index]));
      this._parts = new Map();
    }

    get first() { return this.steps[0] ?? 0; }
    get last() { return this.steps[this.steps.length - 1] ?? 0; }

    /** Returns the index of a step among all steps, or of the nearest one before it. */
    indexOf(step) {
      if (this._index.has(step)) return this._index.get(step);
      let low = 0;
      while (low + 1 < this.steps.length && this.steps[low + 1] <= step) low++;
      return low;
    }

    owner(step) {
      return (this._owners.find(({ start }) => step >= start) ?? this._owners[0]).contents;
    }

    /** Tells whether a step of a branch belongs to this run; null stands for the whole branch. */
    includes(branch, step) {
      return this._owners.some((one) => one.branch === branch
        && (step === null || (step >= one.start && step < one.stop)));
    }

    /** Returns {columns, row} of a part of the contents at a step; row is -1 if it has none. */
    at(name, step) {
      const columns = this.owner(step)[name];
      if (!columns) return { columns: null, row: -1 };
      if (!this._parts.has(columns))
        this._parts.set(columns, new Map(Array.from(columns.step, (own, row) => [own, row])));
      return { columns, row: this._parts.get(columns).get(step) ?? -1 };
    }

    /** Returns a scalar of a step, null where it is not known. */
    scalar(name, step) {
      const { columns, row } = this.at("steps", step);
      const value = row < 0 ? null : columns[name][row];
      return value === null || Number.isNaN(value) ? null : value;
    }

    /** Returns the text of the token at a position, "" without one. */
    textAt(pos) { return this.tokens.text[this._tokenAt.get(pos)] ?? ""; }

    tokenIndex(pos) { return this._tokenAt.get(pos) ?? -1; }

    /** Returns the number of the segment of a position, -1 outside of all. */
    segmentAt(pos) {
      const found = this.segments.findIndex(({ start, stop }) => pos >= start && pos < stop);
      const last = this.segments.length - 1;
      return found < 0 && last >= 0 && pos >= this.segments[last].start ? last : found;
    }

    /** Returns a position in words: 45 “capital” (paraphrase 3). */
    name(pos, withSegment = true) {
      const text = this.textAt(pos).trim() || this.textAt(pos), segment = this.segmentAt(pos);
      const label = withSegment && segment >= 0 ? ` (${this.segments[segment].label})` : "";
      return `${pos}${text ? ` “${text}”` : ""}${label}`;
    }

    layers() {
      const { attention, paths, masks } = this.contents;
      if (paths) return paths.layers;
      return attention ? attention.layers : masks ? masks.views.flatMap((view) => view.layers) : [0];
    }

    nHeads() {
      const { attention, token_attention: tokens, masks } = this.contents;
      if (attention) return attention.share.shape[2];
      if (tokens) return tokens.share[0].shape[1];
      return Math.max(1, ...(masks ? masks.views.map((view) => view.heads) : []));
    }
  }

  function headOf(g, b) {
    const generation = Data.head.generations.find((one) => one.generation === g);
    const branch = generation && generation.branches.find((one) => one.branch === b);
    return { generation, branch };
  }

  async function loadRun(g, b) {
    const { generation, branch } = headOf(g, b), family = [];
    const seen = new Set();
    for (let here = branch; here && !seen.has(here.branch); here = headOf(g, here.parent).branch) {
      seen.add(here.branch); // a damaged trace may have a cycle
      const contents = await Data.branch(g, here.branch);
      family.push({ branch: here.branch, contents, fork: here.fork_step ?? 0 });
    }
    return new Run(generation, branch, family);
  }

  // -- the place ----------------------------------------------------------------------------------

  function readAddress() {
    const found = {};
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value] = part.split("=");
      if (NAMES.includes(name) && /^\d{1,9}$/.test(value ?? "")) found[name] = Number(value);
    }
    return found;
  }

  function address(of) {
    const shown = NAMES.filter((name) => of[name] !== null && !(name === "b" && of.b === 0));
    return `#${shown.map((name) => `${name}=${of[name]}`).join("&")}`;
  }

  function nearest(values, wanted) {
    return values.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best,
      values[0] ?? 0);
  }

  let request = 0;

  /** Goes to a place: `changes` has some of its names. `jump` adds an entry to the history. */
  async function go(changes, { jump = false } = {}) {
    const next = { ...place, ...changes }, mine = ++request;
    const generations = Data.head.generations;
    if (!headOf(next.g, next.b).branch) next.b = 0;
    if (!headOf(next.g, next.b).branch) {
      next.g = generations[0].generation;
      next.b = generations[0].branches[0].branch;
    }
    if (next.g !== place.g || next.b !== place.b) {
      if (!("q" in changes)) next.q = next.k = null;
    }
    const loaded = run && run.generation.generation === next.g && run.branch.branch === next.b
      ? run : await loadRun(next.g, next.b);
    if (mine !== request) return; // a later request was made meanwhile
    run = loaded;
    next.s = run.steps[run.indexOf(next.s)] ?? 0;
    next.layer = nearest(run.layers(), next.layer);
    next.head = Math.min(Math.max(next.head, 0), run.nHeads() - 1);
    place = next;
    writeAddress(jump);
    for (const listener of listeners) listener(run, place);
  }

  function writeAddress(jump) {
    const wanted = address(place);
    if (location.hash === wanted) return;
    history[jump ? "pushState" : "replaceState"](null, "", wanted);
  }

  return {
    go,
    readAddress,
    address,
    onChange: (listener) => listeners.push(listener),
    get place() { return place; },
    get run() { return run; },
  };
})();
