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
  return context;
}

/** The largest absolute value of one sequence of a tensor. */
function largest(tensor, T, b) {
  let most = 0;
  for (let t = 0; t < T; t++) for (const value of tensor.row(t, b)) most = Math.max(most, Math.abs(value));
  return most;
}

export class View {
  /** `shown`: [{name, note, trace}]; `pick`: {network, layer, sequence, part}. */
  build(shown, pick) {
    this.shown = shown;
    this.pick = pick;
    const main = shown[pick.network];
    this.trace = main.trace;
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
    const [rows, columns] = picture, scale = Math.max(1, Math.floor(416 / Math.max(rows, columns)));
    canvas.width = columns * scale;
    canvas.height = rows * scale;
    this.steps.push((t) => {
      const context = canvas.getContext("2d"), [r, g, blue] = colour("cursor");
      for (let i = 0; i < T; i++) {
        const pixel = Array.from(input.row(i, b)), rgb = pixel.length === 3 ? pixel.map((v) => 255 * v) : mix(dark, light, pixel[0]);
        // What is still to come is dimmed.
        const now = i <= t ? rgb : mix(rgb, [110, 115, 120], 0.72);
        context.fillStyle = `rgb(${now})`;
        context.fillRect((i % columns) * scale, Math.floor(i / columns) * scale, scale, scale);
      }
      context.strokeStyle = `rgb(${r}, ${g}, ${blue})`;
      context.lineWidth = 3;
      context.strokeRect((t % columns) * scale + 1, Math.floor(t / columns) * scale + 1, scale - 2, scale - 2);
      const line = Math.floor(t / columns) + 1, column = (t % columns) + 1;
      const value = input.row(t, b)[0];
      const word = input.width > 1 ? "" : value === 0 ? ", black" : value === 1 ? ", white" : "";
      canvas.setAttribute("aria-label", `Picture of ${rows} by ${columns} pixels, read up to line ${line}, pixel ${column}`);
      $("seen-said").textContent = `${rows} × ${columns} pixels, read line by line; dimmed: not read yet.`;
      return `: line ${line}, pixel ${column}${word}.`;
    });
  }

  buildClasses() {
    const root = $("classes"), b = this.b, charts = [];
    root.replaceChildren();
    for (const { name, note, trace } of this.shown) {
      if (!trace.probabilities) continue;
      const count = trace.probabilities.width;
      const names = trace.classes ?? Array.from({ length: count }, (_, i) => String(i));
      const bars = make("ol", { class: "bars", "aria-label": `Class probabilities of ${name}` });
      bars.style.setProperty("--rows", Math.ceil(count / 2));
      const items = names.map((text) => {
        const fill = make("i"), said = make("span");
        const item = make("li", {}, make("span", {}, text), make("span", { class: "bar" }, fill), said);
        bars.append(item);
        return { item, fill, said };
      });
      const chart = make("canvas", { role: "img", "aria-label": `Probabilities of ${name} over time` });
      root.append(make("div", { class: "network" }, make("h3", {}, name, make("small", {}, note ? ` ${note}` : "")), bars, chart, make("p", { class: "note" }, "Probabilities over time.")));
      charts.push([chart, trace, names]);
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
    // Once all are there, and have their widths.
    for (const one of charts) this.chart(...one);
  }

  /** Lines of all classes over time; the three that were likely longest have colours and names. */
  chart(canvas, trace, names) {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    const width = box.width, height = 96, foot = 4;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const T = trace.T, count = trace.probabilities.width, sums = new Array(count).fill(0);
    for (let t = 0; t < T; t++) trace.probabilities.row(t, this.b).forEach((p, i) => { sums[i] += p ** 2; });
    const order = sums.map((_, i) => i).sort((i, j) => sums[j] - sums[i]);
    const palette = [colour("awake"), colour("plus"), colour("minus")];
    context.strokeStyle = `rgb(${colour("line")})`;
    context.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(foot + (1 - share) * (height - 2 * foot)) + 0.5;
      context.strokeRect(0, y, width, 0);
    }
    const labels = [];
    for (const rank of order.keys()) {
      const place = order.length - 1 - rank, i = order[place];
      const rgb = place < 3 ? palette[place] : colour("line");
      context.strokeStyle = `rgb(${rgb})`;
      context.lineWidth = place < 3 ? 2 : 1;
      context.beginPath();
      let top = 0;
      for (let t = 0; t < T; t++) {
        const p = trace.probabilities.row(t, this.b)[i];
        if (p > trace.probabilities.row(top, this.b)[i]) top = t;
        context.lineTo(((t + 0.5) / T) * width, foot + (1 - p) * (height - 2 * foot));
      }
      context.stroke();
      const most = trace.probabilities.row(top, this.b)[i];
      if (place < 3 && most > 0.15) {
        const x = Math.min(Math.max(((top + 0.5) / T) * width - 4, 2), width - 12);
        labels.push([names[i], x, foot + (1 - most) * (height - 2 * foot) + 14, rgb]);
      }
    }
    // Above all lines, each name in the colour of its own, with a rim that sets it off.
    context.font = "700 13px system-ui, sans-serif";
    context.strokeStyle = `rgb(${colour("paper")})`;
    context.lineWidth = 4;
    context.lineJoin = "round";
    for (const [text, x, y, rgb] of labels) {
      context.strokeText(text, x, y);
      context.fillStyle = `rgb(${rgb})`;
      context.fillText(text, x, y);
    }
    this.track(canvas);
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
    let most = 0;
    if (layer.keep) for (let t = 0; t < T; t++) for (let j = 0; j < N; j++) if (awake(t, j)) most = Math.max(most, layer.keep.row(t, b)[j]);
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
    const raw = Math.floor(Math.log10(most)), power = raw >= -1 && raw <= 2 ? 0 : raw, unit = 10 ** power;
    const places = Math.max(0, 1 - Math.floor(Math.log10(most / unit)));
    const chooses = taken !== null && taken.data instanceof Uint8Array;
    const exponent = make("sup", {}, String(power).replace("-", "−"));
    const caption = power ? make("caption", {}, `${title}, scores × 10`, exponent) : make("caption", {}, title);
    const heads = Array.from({ length: K }, (_, k) => make("th", { scope: "col" }, String(k)));
    const body = make("tbody"), lines = [];
    for (let j = 0; j < N; j++) {
      const head = make("th", { scope: "row" }, `cell ${j}`), cells = Array.from({ length: K }, () => make("td"));
      const line = make("tr", {}, head, ...cells);
      body.append(line);
      lines.push({ line, cells });
    }
    root.append(make("div", { class: "map" }, make("table", {}, caption, make("thead", {}, make("tr", {}, make("td"), ...heads)), body)));
    const [plus, minus] = ["plus", "minus"].map(colour);
    this.steps.push((t) => {
      const row = scores.row(t, b), chosen = chooses ? taken.row(t, b) : null, awake = this.layer.active.row(t, b);
      lines.forEach(({ line, cells }, j) => {
        line.classList.toggle("asleep", !awake[j]);
        cells.forEach((cell, k) => {
          const value = row[j * K + k], share = Math.sqrt(Math.abs(value) / most);
          cell.textContent = signed(value / unit, places);
          cell.style.backgroundColor = `rgba(${value < 0 ? minus : plus}, ${(0.6 * share).toFixed(3)})`;
          const takes = chosen !== null && chosen[j * K + k] === 1;
          cell.className = takes ? (own && j === k ? "own" : "taken") : "";
        });
      });
      return "";
    });
  }
}
