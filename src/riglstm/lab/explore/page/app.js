// The explorer: what is asked for, the time, the link, and the two tabs.

import { decode, encode, Pad, SIDE } from "./digit.js";
import { readFile, readTrace } from "./trace.js";
import { paint, View } from "./view.js";

const $ = (id) => document.getElementById(id);
const WAIT = 250;

const view = new View();
const state = {
  tab: "digit", side: 14, noise: 0, hide: "nothing", part: "active",
  network: 0, layer: 0, sequence: 0, t: null,
};
/** By tab, what is shown: [{name, note, trace}]. */
const shown = { digit: null, trace: null };
let about = null, examples = null, playing = null, asked = null, waiting = 0;

const pad = new Pad($("pad"), () => ask());

function tell(problem) {
  $("problem").textContent = problem ?? "";
  $("problem").hidden = !problem;
}

// The picture goes to the server, and readings come back.

/** Ask for a reading, once nothing has changed for a moment. */
function ask(wait = WAIT) {
  if (!about) return;
  clearTimeout(waiting);
  document.body.dataset.state = "reading";
  waiting = setTimeout(read, wait);
}

async function read() {
  asked?.abort();
  asked = new AbortController();
  const mine = asked;
  $("view").setAttribute("aria-busy", "true");
  try {
    const answer = await fetch("api/read", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ pixels: pad.rows(), side: state.side, noise: state.noise, hide: state.hide }),
      signal: mine.signal,
    });
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.error);
    shown.digit = said.traces.map((one, i) => {
      const { name, accuracy } = about.networks[i], share = accuracy[`${state.side}x${state.side}`];
      const note = share === undefined ? "" : `${(100 * share).toFixed(1)} % of all test digits at this size`;
      return { name, note, trace: readTrace(one) };
    });
    tell(null);
  } catch (error) {
    if (error.name === "AbortError") return;
    tell(error instanceof TypeError ? "The server does not answer; start `riglstm explore` again." : error.message);
  }
  if (mine !== asked) return;
  $("view").setAttribute("aria-busy", "false");
  if (state.tab === "digit") show();
  document.body.dataset.state = "ready";
}

// What is shown.

const steps = () => shown[state.tab][state.network].trace.T;

/** Show what the tab has, from its start; the step stays where it was, as far as there is one. */
function show() {
  const traces = shown[state.tab];
  $("view").hidden = !traces?.length;
  if (!traces?.length) return;
  state.network = Math.min(state.network, traces.length - 1);
  const trace = traces[state.network].trace;
  state.layer = Math.max(0, Math.min(state.layer, trace.layers.length - 1));
  state.sequence = Math.min(state.sequence, trace.B - 1);
  options("network", traces.map(({ name, trace: one }, i) => (one.layers.length ? [i, name] : null)).filter(Boolean));
  options("layer", trace.layers.map(({ name }, i) => [i, name || String(i)]));
  options("sequence", Array.from({ length: trace.B }, (_, i) => [i, String(i)]));
  $("time").max = trace.T;
  view.build(traces, state);
  // At the end where nothing else was asked for: all is read by then.
  go(state.t === null ? trace.T - 1 : Math.min(state.t, trace.T - 1));
}

function options(name, all) {
  $(`pick-${name}`).replaceChildren(...all.map(([value, text]) => new Option(text, value, false, value === state[name])));
  $(`pick-${name}-label`).hidden = all.length < 2;
}

/** Go to a step, counted from 0. */
function go(t) {
  const last = steps() - 1, at = Math.min(Math.max(t, 0), last);
  // A longer sequence is shown to its end, too.
  state.t = at === last ? null : at;
  $("time").value = at + 1;
  $("time").setAttribute("aria-valuetext", `step ${at + 1} of ${last + 1}`);
  $("status").textContent = view.step(at);
  if (!playing) remember();
}

const now = () => state.t ?? steps() - 1;

function play() {
  if (playing || !shown[state.tab]?.length) return;
  if (now() === steps() - 1) go(0);
  // A screen reader hears where it stops, and not every step.
  $("status").setAttribute("aria-live", "off");
  $("play").textContent = "Pause";
  let last = performance.now(), due = 0;
  const tick = (at) => {
    due += ((at - last) / 1000) * Number($("speed").value);
    last = at;
    if (due >= 1) {
      const many = Math.floor(due);
      due -= many;
      go(now() + many);
    }
    if (now() === steps() - 1) pause();
    else playing = requestAnimationFrame(tick);
  };
  playing = requestAnimationFrame(tick);
}

function pause() {
  if (!playing) return;
  cancelAnimationFrame(playing);
  playing = null;
  $("play").textContent = "Play";
  $("status").setAttribute("aria-live", "polite");
  go(now());
}

function move(by) {
  if (!shown[state.tab]?.length) return;
  pause();
  go(now() + by);
}

// The link: everything that the view depends on, after the #.

function remember() {
  const said = new URLSearchParams({ tab: state.tab });
  if (state.tab === "digit") {
    for (const name of ["side", "noise", "hide"]) said.set(name, state[name]);
    said.set("picture", encode(pad.pixels));
  }
  for (const name of ["part", "network", "layer", "sequence"]) said.set(name, state[name]);
  if (state.t !== null) said.set("step", state.t + 1);
  history.replaceState(null, "", `#${said}`);
}

/** Take over what a link says; what it says wrongly stays as it is. */
function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  const whole = (name, low, high) => {
    const value = Number(said.get(name) ?? NaN);
    return Number.isInteger(value) && value >= low && value <= high ? value : null;
  };
  state.tab = said.get("tab") === "trace" ? "trace" : "digit";
  state.side = whole("side", ...about.sides) ?? state.side;
  const noise = Number(said.get("noise") ?? NaN);
  if (noise >= 0 && noise <= about.most_noise) state.noise = noise;
  if (about.hidden.includes(said.get("hide"))) state.hide = said.get("hide");
  if (said.get("part") === "keep") state.part = "keep";
  for (const name of ["network", "layer", "sequence"]) state[name] = whole(name, 0, 10 ** 6) ?? 0;
  const step = whole("step", 1, 10 ** 9);
  state.t = step === null ? null : step - 1;
  return decode(said.get("picture") ?? "");
}

function fill() {
  $("side").value = state.side;
  $("noise").value = state.noise;
  $("hide").value = state.hide;
  document.querySelector(`input[name="part"][value="${state.part}"]`).checked = true;
  say();
}

function say() {
  $("side-said").textContent = `${state.side} × ${state.side}`;
  $("noise-said").textContent = `${Math.round(100 * state.noise)} %`;
}

function openTab(name) {
  pause();
  state.tab = name;
  for (const one of ["digit", "trace"]) {
    $(`tab-${one}`).setAttribute("aria-selected", one === name);
    $(`tab-${one}`).tabIndex = one === name ? 0 : -1;
    $(`panel-${one}`).hidden = one !== name;
  }
  tell(null);
  if (name === "digit" && !shown.digit) ask(0);
  show();
}

// What the user does.

function listen() {
  for (const [name, of] of [["side", Number], ["noise", Number], ["hide", String]]) {
    $(name).addEventListener("input", () => {
      state[name] = of($(name).value);
      say();
      ask();
    });
  }
  $("clear").addEventListener("click", () => pad.set(new Uint8Array(pad.pixels.length)));
  $("centre").addEventListener("click", () => pad.centre());
  $("erase").addEventListener("change", () => { pad.erase = $("erase").checked; });
  for (const [name, picture] of Object.entries(examples)) {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", `Digit ${name}`);
    const canvas = document.createElement("canvas"), pixels = decode(picture);
    paint(canvas, SIDE, SIDE, (i) => [pixels[i], pixels[i], pixels[i]]);
    button.append(canvas);
    button.addEventListener("click", () => pad.set(pixels));
    $("examples").append(button);
  }
  $("play").addEventListener("click", () => (playing ? pause() : play()));
  $("back").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("time").addEventListener("input", () => { pause(); go(Number($("time").value) - 1); });
  $("link").addEventListener("click", async () => {
    remember();
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    $("link").textContent = "Copied";
    setTimeout(() => { $("link").textContent = "Copy link"; }, 1500);
  });
  for (const name of ["network", "layer", "sequence"]) {
    $(`pick-${name}`).addEventListener("change", () => {
      pause();
      state[name] = Number($(`pick-${name}`).value);
      show();
    });
  }
  for (const radio of document.querySelectorAll('input[name="part"]')) {
    radio.addEventListener("change", () => { state.part = radio.value; show(); });
  }
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (!file) return;
    try {
      shown.trace = [{ name: file.name, note: "", trace: await readFile(file) }];
      Object.assign(state, { network: 0, layer: 0, sequence: 0, t: null });
      tell(null);
    } catch (error) {
      shown.trace = null;
      tell(error.message);
    }
    show();
  });
  for (const name of ["digit", "trace"]) {
    $(`tab-${name}`).addEventListener("click", () => openTab(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "digit" ? "trace" : "digit";
      openTab(other);
      $(`tab-${other}`).focus();
      event.stopPropagation();
    });
  }
  document.addEventListener("keydown", (event) => {
    const own = event.target.closest("button, input, select, textarea, [role=application]");
    // Space presses a button, and arrows move a slider, as everywhere.
    if (own || event.ctrlKey || event.altKey || event.metaKey) return;
    const line = event.shiftKey ? shown[state.tab]?.[state.network].trace.picture?.[1] ?? 10 : 1;
    if (event.key === " ") { if (playing) pause(); else play(); }
    else if (event.key === "ArrowLeft") move(-line);
    else if (event.key === "ArrowRight") move(line);
    else return;
    event.preventDefault();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  window.addEventListener("hashchange", start);
}

/** Begin with what the link says. */
function start() {
  const picture = recall();
  fill();
  shown.digit = null;
  pad.pixels = picture ?? decode(examples["7"]);
  pad.draw();
  openTab(state.tab);
}

async function main() {
  try {
    const files = ["api/about", "examples.json"].map(async (name) => (await fetch(name)).json());
    [about, examples] = await Promise.all(files);
  } catch {
    tell("The server does not answer; start `riglstm explore` again.");
    return;
  }
  [$("side").min, $("side").max] = about.sides;
  $("noise").max = about.most_noise;
  $("hide").replaceChildren(...about.hidden.map((name) => new Option(name)));
  const sources = about.networks.map(({ source }) => source);
  $("trained").textContent = sources.length
    ? `Networks: ${sources.join("; ")}.`
    : "No weights were found: name some with --weights.";
  listen();
  start();
}

/** For tests, and for the curious: what is shown now. */
window.explorer = { state, shown, pad };
main();
