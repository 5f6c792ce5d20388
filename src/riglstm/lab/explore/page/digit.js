// The drawing area: a picture of 28 × 28 pixels, drawn by pointer or keyboard.

export const SIDE = 28;
const RADIUS = 1.25;

export class Pad {
  /** `changed` is called after each change of the picture. */
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.pixels = new Uint8Array(SIDE * SIDE);
    this.erase = false;
    this.pen = null;
    this.last = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.last = this.place(event);
      this.line(this.last, this.last);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.last === null) return;
      const here = this.place(event);
      this.line(this.last, here);
      this.last = here;
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => { this.last = null; });
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) this.pen ??= [14.5, 14.5]; this.draw(); });
    canvas.addEventListener("blur", () => { this.pen = null; this.draw(); });
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const inks = { Enter: 255, Delete: 0, Backspace: 0 };
    this.pen ??= [14.5, 14.5];
    if (event.key in moves) {
      const within = (value) => Math.min(Math.max(value, 0.5), SIDE - 0.5);
      this.pen = this.pen.map((value, i) => within(value + moves[event.key][i]));
      this.draw();
    } else if (event.key in inks) {
      this.line(this.pen, this.pen, inks[event.key]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Ink from one point to another, as wide as the strokes of MNIST's digits. */
  line([x0, y0], [x1, y1], ink = this.erase ? 0 : 255) {
    const dx = x1 - x0, dy = y1 - y0, length = dx * dx + dy * dy;
    for (let row = 0; row < SIDE; row++) {
      for (let column = 0; column < SIDE; column++) {
        const x = column + 0.5 - x0, y = row + 0.5 - y0;
        const along = length ? Math.min(Math.max((x * dx + y * dy) / length, 0), 1) : 0;
        if ((x - along * dx) ** 2 + (y - along * dy) ** 2 <= RADIUS ** 2) {
          this.pixels[row * SIDE + column] = ink;
        }
      }
    }
    this.show();
  }

  set(pixels) {
    this.pixels = Uint8Array.from(pixels);
    this.show();
  }

  /** Move the picture so that the middle of its ink is the middle of the area. */
  centre() {
    let sum = 0, x = 0, y = 0;
    this.pixels.forEach((ink, i) => { sum += ink; x += ink * (i % SIDE); y += ink * Math.floor(i / SIDE); });
    if (!sum) return;
    const middle = (SIDE - 1) / 2;
    const across = Math.round(middle - x / sum), down = Math.round(middle - y / sum);
    const moved = new Uint8Array(SIDE * SIDE);
    this.pixels.forEach((ink, i) => {
      const column = (i % SIDE) + across, row = Math.floor(i / SIDE) + down;
      if (ink && column >= 0 && column < SIDE && row >= 0 && row < SIDE) moved[row * SIDE + column] = ink;
    });
    this.set(moved);
  }

  rows() {
    return Array.from({ length: SIDE }, (_, row) => Array.from(this.pixels.subarray(row * SIDE, (row + 1) * SIDE)));
  }

  show() {
    this.draw();
    this.changed();
  }

  draw() {
    const context = this.canvas.getContext("2d"), size = this.canvas.width / SIDE;
    context.fillStyle = "#000";
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.fillStyle = "#fff";
    this.pixels.forEach((ink, i) => {
      if (ink) context.fillRect((i % SIDE) * size, Math.floor(i / SIDE) * size, size, size);
    });
    if (this.pen) {
      context.strokeStyle = "#ff8a3d";
      context.lineWidth = 2;
      context.beginPath();
      context.arc(this.pen[0] * size, this.pen[1] * size, RADIUS * size, 0, 2 * Math.PI);
      context.stroke();
    }
  }
}

/** The picture as text for a link: a bit a pixel. */
export function encode(pixels) {
  const bytes = new Uint8Array(pixels.length / 8);
  pixels.forEach((ink, i) => { if (ink) bytes[i >> 3] |= 128 >> (i & 7); });
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The picture of a link; null where the text is none. */
export function decode(text) {
  let bytes;
  try {
    bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  } catch {
    return null;
  }
  if (bytes.length !== (SIDE * SIDE) / 8) return null;
  return Uint8Array.from({ length: SIDE * SIDE }, (_, i) => (bytes.charCodeAt(i >> 3) & (128 >> (i & 7)) ? 255 : 0));
}
