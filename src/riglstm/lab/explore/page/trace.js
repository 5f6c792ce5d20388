// A trace as `riglstm.plot.save_trace` writes it: checked, decoded, and read at a step.

const FORMAT = "riglstm-trace", VERSION = 1;
const MOST_BYTES = 64 * 2 ** 20;
const PARTS = ["active", "views", "peers", "view_scores", "peer_scores", "keep"];
const ARRAYS = { uint8: Uint8Array, float32: Float32Array };

/** Numbers with their shape; `row(t, b)` is what belongs to one step of one sequence. */
class Tensor {
  constructor(said, name) {
    const bytes = Uint8Array.from(atob(said.data), (c) => c.charCodeAt(0));
    const kind = ARRAYS[said.dtype];
    if (!kind) throw new Error(`${name} must be uint8 or float32, got ${said.dtype}`);
    this.shape = said.shape;
    this.data = new kind(bytes.buffer);
    const size = said.shape.reduce((a, b) => a * b, 1);
    if (this.data.length !== size) {
      throw new Error(`${name} must have ${size} numbers, as its shape says, got ${this.data.length}`);
    }
    this.width = said.shape.slice(2).reduce((a, b) => a * b, 1);
  }

  row(t, b) {
    const start = (t * this.shape[1] + b) * this.width;
    return this.data.subarray(start, start + this.width);
  }
}

/** The trace in a file or in an answer of the server; throws an Error that a user can read. */
export function readTrace(said) {
  if (said === null || typeof said !== "object" || said.format !== FORMAT) {
    throw new Error("Expected a file that riglstm.plot.save_trace wrote, got another.");
  }
  if (said.version !== VERSION) {
    throw new Error(`Expected a trace of version ${VERSION}, got ${said.version}; save it again with this version of riglstm.`);
  }
  const tensor = (array, name) => (array ? new Tensor(array, name) : null);
  const layers = said.layers.map((layer) => ({
    name: layer.name,
    ...Object.fromEntries(PARTS.map((part) => [part, tensor(layer[part], part)])),
  }));
  return {
    T: said.steps,
    B: said.sequences,
    picture: said.picture,
    input: tensor(said.input, "input"),
    probabilities: tensor(said.probabilities, "probabilities"),
    classes: said.classes,
    // A model without cells has nothing to show of them.
    layers: layers.filter((layer) => layer.active !== null),
  };
}

/** The trace in a file that the user picked. */
export async function readFile(file) {
  if (file.size > MOST_BYTES) {
    const size = (file.size / 2 ** 20).toFixed(0);
    throw new Error(`Expected a file of at most ${MOST_BYTES / 2 ** 20} MiB, got ${size} MiB; save fewer steps or sequences.`);
  }
  let said;
  try {
    said = JSON.parse(await file.text());
  } catch {
    throw new Error("Expected a file that riglstm.plot.save_trace wrote, got one that is not JSON.");
  }
  try {
    return readTrace(said);
  } catch (error) {
    throw error instanceof TypeError || error instanceof DOMException
      ? new Error("Expected a whole trace, got a file that is damaged; save it again.") : error;
  }
}
