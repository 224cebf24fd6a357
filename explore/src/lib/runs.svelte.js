// The runs that the server shows, the one that is chosen, and one that was asked for but is not there, for all views.
import { ask, recorded } from "./ask.js";

export const runs = $state({ list: [], chosen: recorded?.run ?? null, error: null, missing: null, loaded: false });

export async function refresh() {
  try {
    runs.list = (await ask("/api/runs")).runs;
    if (!runs.list.some((one) => one.name === runs.chosen)) {
      runs.missing = runs.chosen;
      runs.chosen = (runs.list.find((one) => !one.error) ?? runs.list[0])?.name ?? null;
    }
    runs.error = null;
  } catch (error) {
    runs.error = error.message;
  }
  runs.loaded = true;
}
