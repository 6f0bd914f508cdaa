// What the report was given.

export const data = JSON.parse(document.getElementById("data").textContent);
export const runs = data.runs;
export const comparable = data.differences.length === 0;

/** Numbers packed as little-endian float32 in base64. */
export function unpack(base64) {
  const raw = atob(base64);
  const buffer = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) buffer[i] = raw.charCodeAt(i);
  const view = new DataView(buffer.buffer);
  return Array.from({ length: raw.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

/** Ragged rows, one for each read, of as many numbers as it has sources. */
export function unpackRows(base64, reads) {
  const flat = unpack(base64);
  let start = 0;
  return reads.map(({ sources }) => flat.slice(start, (start += sources.length)));
}

/** An array of a run's diagnostics, or null. */
export function array(run, name) {
  return run.diagnostics?.arrays[name] ?? null;
}

/** Why a run has no such array. */
export function whyMissing(run, name) {
  return (
    run.problems[name] ??
    run.problems.diagnostics ??
    `${run.name} has no ${name.replaceAll("_", " ")} in its diagnostics`
  );
}

/** Names of the sub-layers in order: "attention 1", "MLP 1", "attention 2", ... */
export function sublayerName(index) {
  return `${index % 2 === 0 ? "attention" : "MLP"} ${Math.floor(index / 2) + 1}`;
}

export function readName(index, numSublayers) {
  return index === numSublayers ? "final read" : `before ${sublayerName(index)}`;
}
