// The page's own arithmetic. Every function here is tested against the library.

/** log(sum(exp(x))), without overflow. */
export function logSumExp(logits) {
  const max = Math.max(...logits);
  return max + Math.log(logits.reduce((sum, x) => sum + Math.exp(x - max), 0));
}

export function softmax(logits) {
  const max = Math.max(...logits);
  const terms = logits.map((x) => Math.exp(x - max));
  const sum = terms.reduce((a, b) => a + b, 0);
  return terms.map((term) => term / sum);
}

/** 1 / (1 + exp(-x)), exact to the last bits on both sides of 0. */
export function sigmoid(x) {
  if (x >= 0) return 1 / (1 + Math.exp(-x));
  const e = Math.exp(x);
  return e / (1 + e);
}

/** Phase 1 of one read: its weights over the finished sources, and their log-sum-exp. */
export function phase1(logits) {
  return { weights: softmax(logits), lse: logSumExp(logits) };
}

/** Phase 2: how much of the open partial sum the read takes. */
export function gate(partialLogit, lse) {
  return sigmoid(partialLogit - lse);
}

/** The joint weights: those of phase 1, scaled, and the gate last. */
export function mergeWeights(weights, g) {
  return [...weights.map((w) => (1 - g) * w), g];
}

/** h = o + g (p - o), number by number. */
export function mergeOutputs(output, partialSum, g) {
  return output.map((o, i) => o + g * (partialSum[i] - o));
}

// ------------------------------------------------------------------ which sources a read has

/**
 * Sources of read `index` (from 0; `numSublayers` is the final read) with blocks of `blockSize`
 * sub-layers; 1 is Full. `finished` counts the embedding and the finished blocks, `open` the
 * outputs in the open partial sum: 0 at a block's first sub-layer, which has no such source.
 */
export function sourcesOfRead(index, numSublayers, blockSize) {
  if (index === numSublayers) {
    return { finished: 1 + Math.ceil(numSublayers / blockSize), open: 0 };
  }
  return { finished: 1 + Math.floor(index / blockSize), open: index % blockSize };
}

export function sourceCount(index, numSublayers, blockSize) {
  const { finished, open } = sourcesOfRead(index, numSublayers, blockSize);
  return finished + (open > 0 ? 1 : 0);
}

/** Bytes of the sources that are alive for `tokens` tokens. */
export function cacheBytes(numSources, tokens, width, bytesPerNumber) {
  return numSources * tokens * width * bytesPerNumber;
}

// ------------------------------------------------------------------ rows of D moved per token

/**
 * Rows of D that memory moves per token for sub-layer `i` (from 0) of a block behind `finished`
 * sources, between that sub-layer's turn and its normalised input: what the kernels read and write.
 * A first sub-layer has no partial sum. What the sub-layers themselves move is left out.
 */
export function rowsOfSublayer(scheme, i, finished) {
  const first = i === 0;
  if (scheme === "two phases") return first ? 0 : 5; // o, partial, f; partial, h
  if (scheme === "one read each") return finished + (first ? 1 : 4); // sources; partial, f; both out
  if (scheme === "standard") return 4; // stream, f; stream, h
  throw new Error(`no scheme ${scheme}`);
}

/** Phase 1 reads every finished source once and writes an output for each read of the block. */
export function rowsOfPhase1(scheme, reads, finished) {
  return scheme === "two phases" ? finished + reads : 0;
}

/** Sealing a block: its partial sum and last output are read, their sum is written. */
export function rowsOfSeal(scheme, reads) {
  return scheme === "standard" || reads === 1 ? 0 : 3;
}

export function rowsOfBlock(scheme, reads, finished) {
  let rows = rowsOfPhase1(scheme, reads, finished) + rowsOfSeal(scheme, reads);
  for (let i = 0; i < reads; i += 1) rows += rowsOfSublayer(scheme, i, finished);
  return rows;
}

// ------------------------------------------------------------------ what crosses pipeline stages

/** Paper, equation 7: blocks that cross when every hop carries the whole history. */
export function paperNaive(stages, virtual, blocksPerChunk) {
  const chunks = stages * virtual;
  return ((chunks * (chunks - 1)) / 2) * blocksPerChunk;
}

/** Paper, equation 8: blocks that cross when stages keep what they have received. */
export function paperCached(stages, virtual, blocksPerChunk) {
  const first = (stages * (stages - 1)) / 2;
  return (first + (virtual - 1) * stages * stages) * blocksPerChunk;
}

/**
 * The C - 1 transfers of a microbatch's forward pass, counted exactly: the embedding too, and
 * without the blocks that the receiving stage produced itself.
 */
export function hops(stages, virtual, blocksPerChunk) {
  const list = [];
  for (let chunk = 1; chunk < stages * virtual; chunk += 1) {
    const needs = chunk * blocksPerChunk + 1;
    const has = chunk >= stages ? (chunk - stages + 1) * blocksPerChunk + 1 : 0;
    list.push({ chunk, stage: chunk % stages, needs, has, naive: needs, cached: needs - has });
  }
  return list;
}
