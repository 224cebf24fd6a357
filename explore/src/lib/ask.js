// Asks the server. In a page that was saved to a file, the answers are inside the page.

const block = document.getElementById("recorded");
export const recorded = block ? JSON.parse(block.textContent) : null;

const sorted = (value) =>
  value && typeof value === "object" && !Array.isArray(value)
    ? Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]))
    : value;

function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const arrays = data.arrays.map(({ type, shape }) => {
    at = Math.ceil(at / 8) * 8;
    const kind = { Uint8Array, Uint16Array, Float32Array }[type];
    const array = new kind(buffer, at, shape.reduce((a, b) => a * b, 1));
    at += array.byteLength;
    return array;
  });
  return { ...data, arrays };
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;

/** Returns the answer to a request: plain data, with typed arrays in `arrays` if it has some. Throws an Error with one sentence. */
export async function ask(path, body = {}, signal = undefined) {
  const text = JSON.stringify(sorted(body));
  if (recorded) {
    const found = recorded.answers[`${path} ${text}`];
    if (found === undefined) throw new Error("this saved page does not contain that; start everyformer explore to see it");
    return typeof found === "string" ? unpack(bytes(found)) : found;
  }
  let answer;
  try {
    answer = await fetch(`.${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the page has lost its server; start everyformer explore again");
  }
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({ error: { message: `the server answered ${answer.status}` } }));
    throw new Error(error.message);
  }
  const kind = answer.headers.get("Content-Type") ?? "";
  return kind.startsWith("application/json") ? answer.json() : unpack(await answer.arrayBuffer());
}

/** Returns a function that asks and drops the answer if it is called again before. Calls `done(answer, error)` otherwise. */
export function latest() {
  let controller = null;
  return async (path, body, done) => {
    controller?.abort();
    const mine = (controller = new AbortController());
    try {
      const answer = await ask(path, body, mine.signal);
      if (mine === controller) done(answer, null);
    } catch (error) {
      if (mine === controller && error.name !== "AbortError") done(null, error.message);
    }
  };
}
