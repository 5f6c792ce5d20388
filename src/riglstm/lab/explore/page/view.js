// A trace at a step: the picture, the class probabilities, the cells, and what each looks at.

const $ = (id) => document.getElementById(id);

/** An element with attributes and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A colour of the style sheet as [r, g, b], in the theme of now. */
function colour(name) {
  const said = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  if (said.includes(",")) return said.split(",").map(Number);
  return [1, 3, 5].map((i) => parseInt(said.slice(i, i + 2), 16));
}

const mix = (a, b, share) => a.map((value, i) => value + (b[i] - value) * share);
const percent = (share) => (share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`);
const signed = (value, places) => (Number(value.toFixed(places)) + 0).toFixed(places).replace("-", "−");

/** Fill a canvas pixel by pixel; `of(i)` is the colour of pixel i, or null for none. */
export function paint(canvas, columns, rows, of) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let i = 0; i < columns * rows; i++) {
    const rgb = of(i);
    if (rgb) image.data.set([...rgb, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

/** The largest absolute value of one sequence of a tensor, where `counts(t, i)` is true. */
function largest(tensor, T, b, counts = () => true) {
  let most = 0;
  for (let t = 0; t < T; t++) tensor.row(t, b).forEach((value, i) => { if (counts(t, i)) most = Math.max(most, Math.abs(value)); });
  return most;
}

/** The three classes that were likely longest in one sequence. */
function longest({ T, probabilities }, b) {
  const sums = new Array(probabilities.width).fill(0);
  for (let t = 0; t < T; t++) probabilities.row(t, b).forEach((p, i) => { sums[i] += p ** 2; });
  return [...sums.keys()].sort((i, j) => sums[j] - sums[i]).slice(0, 3);
}

export class View {
  /** `shown`: [{name, note, trace}]; `pick`: {network, layer, sequence, part}. */
  build(shown, pick) {
    this.shown = shown;
    this.pick = pick;
    this.trace = shown[pick.network].trace;
    this.layer = this.trace.layers[pick.layer] ?? null;
    this.b = pick.sequence;
    this.steps = [];
    this.buildSeen();
    this.buildClasses();
    this.buildCells();
    this.buildMaps();
  }

  /** Show a step, counted from 0; returns it in words. */
  step(t) {
    $("view").style.setProperty("--at", (t + 0.5) / this.trace.T);
    const words = this.steps.map((show) => show(t)).filter(Boolean);
    return [`Step ${t + 1} of ${this.trace.T}${words.length && words[0].startsWith(":") ? "" : "."}`, ...words].join(" ").replace(" :", ":");
  }

  buildSeen() {
    const { picture, input, T } = this.trace, b = this.b, canvas = $("seen");
    $("seen-figure").hidden = !input;
    document.querySelector(".reading").classList.toggle("wide", !picture);
    canvas.style.height = picture ? "" : "72px";
    if (!input) return;
    const C = input.width, dark = [0, 0, 0], light = [255, 255, 255];
    if (!picture) {
      const most = largest(input, T, b) || 1, zero = colour("asleep-soft");
      paint(canvas, T, C, (i) => {
        const value = input.row(i % T, b)[Math.floor(i / T)] / most;
        return mix(zero, colour(value < 0 ? "minus" : "plus"), Math.abs(value));
      });
      this.track(canvas);
      $("seen-said").textContent = `The input over time, ${C} ${C === 1 ? "feature" : "features"}; orange is positive, blue negative.`;
      return;
    }
    const [rows, columns] = picture, cursor = colour("cursor");
    $("seen-said").textContent = `${rows} × ${columns} pixels, read line by line; dimmed: not read yet.`;
    this.steps.push((t) => {
      paint(canvas, columns, rows, (i) => {
        if (i === t) return cursor;
        const pixel = input.row(i, b), rgb = C === 3 ? [...pixel].map((v) => 255 * v) : mix(dark, light, pixel[0]);
        // What is still to come is dimmed.
        return i < t ? rgb : mix(rgb, [110, 115, 120], 0.72);
      });
      const line = Math.floor(t / columns) + 1, column = (t % columns) + 1;
      const word = C > 1 ? "" : { 0: ", black", 1: ", white" }[input.row(t, b)[0]] ?? "";
      canvas.setAttribute("aria-label", `Picture of ${rows} by ${columns} pixels, read up to line ${line}, pixel ${column}`);
      return `: line ${line}, pixel ${column}${word}.`;
    });
  }

  buildClasses() {
    const root = $("classes"), b = this.b;
    root.replaceChildren();
    for (const { name, note, trace } of this.shown) {
      if (!trace.probabilities) continue;
      const names = trace.classes ?? Array.from({ length: trace.probabilities.width }, (_, i) => String(i));
      const bars = make("ol", { class: "bars", "aria-label": `Class probabilities of ${name}` });
      bars.style.setProperty("--rows", Math.ceil(names.length / 2));
      const items = names.map((text) => {
        const fill = make("i"), said = make("span");
        const item = make("li", {}, make("span", {}, text), make("span", { class: "bar" }, fill), said);
        bars.append(item);
        return { item, fill, said };
      });
      const chart = make("div", { class: "chart" });
      root.append(make("div", { class: "network" }, make("h3", {}, name, make("small", {}, note ? ` ${note}` : "")), bars, chart));
      chart.innerHTML = this.chart(trace);
      this.track(chart.firstChild);
      const likely = longest(trace, b);
      chart.append(make("p", { class: "note" }, "Probabilities over time: ", ...likely.map((i, place) => make("b", { class: `line-${place}` }, `${names[i]} `))));
      this.steps.push((t) => {
        const row = trace.probabilities.row(t, b), best = row.indexOf(Math.max(...row));
        items.forEach(({ item, fill, said }, i) => {
          fill.style.width = `${100 * row[i]}%`;
          said.textContent = percent(row[i]);
          item.classList.toggle("best", i === best);
        });
        return `${name} reads ${names[best]} (${percent(row[best])}).`;
      });
    }
    root.hidden = !root.childElementCount;
  }

  /** Lines of all classes over time, as SVG; the three that were likely longest have colours. */
  chart(trace) {
    const { T, probabilities } = trace, likely = longest(trace, this.b), lines = [];
    for (let i = 0; i < probabilities.width; i++) {
      const points = Array.from({ length: T }, (_, t) => `${t + 0.5},${(1 - probabilities.row(t, this.b)[i]).toFixed(3)}`);
      const line = `<polyline class="line-${likely.indexOf(i)}" points="${points.join(" ")}"/>`;
      if (likely.includes(i)) lines.push(line);
      else lines.unshift(line);
    }
    return `<svg viewBox="0 -0.04 ${T} 1.08" preserveAspectRatio="none" aria-hidden="true">${lines.join("")}</svg>`;
  }

  /** Lay a cursor over a canvas whose width is the time. */
  track(canvas) {
    if (canvas.parentElement.classList.contains("track")) return;
    const around = make("div", { class: "track" });
    canvas.replaceWith(around);
    around.append(canvas, make("div", { class: "cursor", "aria-hidden": "true" }));
  }

  buildCells() {
    const root = $("cells"), layer = this.layer, { T, picture, input } = this.trace, b = this.b;
    root.replaceChildren();
    $("cells-section").hidden = $("looks-section").hidden = !layer;
    if (!layer) return;
    const keeps = this.pick.part === "keep" && layer.keep !== null;
    const N = layer.active.width, awake = (t, j) => layer.active.row(t, b)[j] === 1;
    const most = keeps ? largest(layer.keep, T, b, awake) : 0;
    const ink = (i) => !picture || !input || input.row(i, b)[0] > 0.5;
    const colours = {
      awake: colour("awake"), awakeSoft: colour("awake-soft"), asleep: colour("asleep"),
      asleepSoft: colour("asleep-soft"), kept: colour("cursor"),
    };
    const of = (i, j) => {
      if (!awake(i, j)) return picture && ink(i) && !keeps ? colours.asleep : colours.asleepSoft;
      if (keeps) return mix(colours.awakeSoft, colours.kept, layer.keep.row(i, b)[j] / (most || 1));
      return ink(i) ? colours.awake : colours.awakeSoft;
    };
    $("cells-said").textContent = keeps
      ? `How much of its old state each cell kept while awake, from green (0) to orange (${most.toFixed(2)}). Grey: it slept.`
      : `Green: the cell was awake. Grey: it slept.${picture ? " Strong colours lie on the stroke." : ""}`;
    root.className = picture ? "tiles" : "rows";
    for (let j = 0; j < N; j++) {
      const sums = new Uint32Array(T);
      for (let t = 0; t < T; t++) sums[t] = (t ? sums[t - 1] : 0) + (awake(t, j) ? 1 : 0);
      const state = make("span"), said = make("p");
      const canvas = make("canvas", { role: "img" });
      const card = make("div", { class: "cell" }, make("h3", {}, `Cell ${j}`, state), canvas, said);
      root.append(card);
      canvas.setAttribute("aria-label", `Cell ${j} was awake in ${percent(sums[T - 1] / T)} of all steps`);
      if (!picture) {
        paint(canvas, T, 1, (i) => of(i, j));
        this.track(canvas);
      }
      this.steps.push((t) => {
        const now = awake(t, j);
        card.classList.toggle("awake", now);
        state.textContent = now ? "awake" : "asleep";
        const kept = layer.keep && now ? `keeps ${layer.keep.row(t, b)[j].toFixed(3)}` : layer.keep ? "keeps all" : "";
        const parts = [kept, `awake in ${percent(sums[t] / (t + 1))}`].filter(Boolean);
        said.replaceChildren(...parts.map((text) => make("span", {}, text)));
        if (picture) paint(canvas, picture[1], picture[0], (i) => (i <= t ? of(i, j) : null));
        return j === 0 ? this.awakeInWords(t) : "";
      });
    }
  }

  awakeInWords(t) {
    const row = Array.from(this.layer.active.row(t, this.b));
    const numbers = row.flatMap((awake, j) => (awake ? [j] : []));
    return `Awake: ${numbers.length ? `cells ${numbers.join(", ")}` : "none"}.`;
  }

  buildMaps() {
    const root = $("maps"), layer = this.layer;
    root.replaceChildren();
    if (!layer) return;
    for (const [part, title, own] of [["view", "Views of the input", false], ["peer", "Other cells", true]]) {
      const scores = layer[`${part}_scores`], taken = layer[`${part}s`];
      if (scores) this.map(root, title, scores, taken, own);
    }
  }

  /** One table of scores, a row for each cell that looks. */
  map(root, title, scores, taken, own) {
    const { T } = this.trace, b = this.b, [N, K] = scores.shape.slice(2), most = largest(scores, T, b) || 1;
    const places = Math.max(0, 1 - Math.floor(Math.log10(most))), chooses = taken !== null && taken.data instanceof Uint8Array;
    const heads = Array.from({ length: K }, (_, k) => make("th", { scope: "col" }, String(k)));
    const body = make("tbody"), lines = [];
    for (let j = 0; j < N; j++) {
      const head = make("th", { scope: "row" }, `cell ${j}`), cells = Array.from({ length: K }, () => make("td"));
      const line = make("tr", {}, head, ...cells);
      body.append(line);
      lines.push({ line, cells });
    }
    root.append(make("div", { class: "map" }, make("table", {}, make("caption", {}, title), make("thead", {}, make("tr", {}, make("td"), ...heads)), body)));
    const [plus, minus] = ["plus", "minus"].map(colour);
    this.steps.push((t) => {
      const row = scores.row(t, b), chosen = chooses ? taken.row(t, b) : null, awake = this.layer.active.row(t, b);
      lines.forEach(({ line, cells }, j) => {
        line.classList.toggle("asleep", !awake[j]);
        cells.forEach((cell, k) => {
          const value = row[j * K + k], share = Math.sqrt(Math.abs(value) / most);
          cell.textContent = signed(value, places);
          cell.style.backgroundColor = `rgba(${value < 0 ? minus : plus}, ${(0.6 * share).toFixed(3)})`;
          const takes = chosen !== null && chosen[j * K + k] === 1;
          cell.className = takes ? (own && j === k ? "own" : "taken") : "";
        });
      });
    });
  }
}
