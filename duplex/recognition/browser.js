"use strict";
// Replaces the server of page.html: decodes images, prepares them exactly as Pillow does (`Image.resize`, fixed-point
// weights of 22 bits), and runs model.onnx by onnxruntime-web.
const BITS = 2 ** 22;
const FILTERS = {  // support, weight at a distance x >= 0
  bilinear: [1, x => Math.max(0, 1 - x)],
  bicubic: [2, x => x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? -0.5 * (((x - 5) * x + 8) * x - 4) : 0],
};
const nearestEven = x => Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);

// For each of `count` places from `first` on, of a line scaled from `from` to `to` places: the first place that it is
// computed from, and the weights.
function weights(from, to, first, count, interpolation) {
  const [support, filter] = FILTERS[interpolation], step = from / to, scale = Math.max(1, step);
  return Array.from({ length: count }, (_, place) => {
    const centre = (first + place + 0.5) * step;
    const start = Math.max(0, Math.trunc(centre - support * scale + 0.5));
    const end = Math.min(from, Math.trunc(centre + support * scale + 0.5));
    const raw = Array.from({ length: end - start }, (_, k) => filter(Math.abs(start + k - centre + 0.5) / scale));
    const sum = raw.reduce((a, b) => a + b, 0);
    return [start, raw.map(w => Math.sign(w) * Math.floor(Math.abs(w) / sum * BITS + 0.5))];
  });
}

// Pixels [3, size, size] of RGBA `data`: the shorter side is scaled to `size`, then the middle is cut out.
function prepare(data, width, height, size, interpolation) {
  const short = Math.min(width, height), wide = Math.trunc(size * width / short), high = Math.trunc(size * height / short);
  const columns = weights(width, wide, nearestEven((wide - size) / 2), size, interpolation);
  const rows = weights(height, high, nearestEven((high - size) / 2), size, interpolation);
  const squeezed = new Uint8ClampedArray(3 * height * size), pixels = new Uint8Array(3 * size * size);
  for (let y = 0; y < height; y++) columns.forEach(([start, share], x) => {
    for (let c = 0; c < 3; c++) {
      let sum = BITS / 2;
      for (let k = 0; k < share.length; k++) sum += share[k] * data[4 * (y * width + start + k) + c];
      squeezed[(c * height + y) * size + x] = Math.floor(sum / BITS);
    }
  });
  rows.forEach(([start, share], y) => {
    for (let c = 0; c < 3; c++) for (let x = 0; x < size; x++) {
      let sum = BITS / 2;
      for (let k = 0; k < share.length; k++) sum += share[k] * squeezed[(c * height + start + k) * size + x];
      pixels[(c * size + y) * size + x] = Math.min(255, Math.max(0, Math.floor(sum / BITS)));
    }
  });
  return pixels;
}

async function pixelsOf(file, model) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return prepare(data, canvas.width, canvas.height, model.size, model.interpolation);
}

function ranked(names, shares) {
  return Object.fromEntries(names.map((name, place) => [name, shares[place]]).sort((a, b) => b[1] - a[1]).slice(0, 3));
}

async function answer(file, model, session) {
  let pixels;
  try { pixels = await pixelsOf(file, model); } catch { return { error: "not an image" }; }
  const input = new ort.Tensor("uint8", pixels, [1, 3, model.size, model.size]);
  const { probabilities: { data: shares }, distance: { data: [distance] } } = await session.run({ pixels: input });
  const states = model.states.map(() => 0), objects = model.objects.map(() => 0);
  shares.forEach((share, c) => { states[model.state_of[c]] += share; objects[model.object_of[c]] += share; });
  const best = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
  const top = best.map(c => ({
    state: model.states[model.state_of[c]], object: model.objects[model.object_of[c]], probability: shares[c], seen: model.seen[c],
  }));
  const near = model.threshold === null || distance <= model.threshold;
  return { top, states: ranked(model.states, states), objects: ranked(model.objects, objects), in_distribution: near, distance };
}

ort.env.wasm.numThreads = 1;  // more need headers that plain hosts do not send
const loaded = Promise.all([fetch("model.json").then(reply => reply.json()), ort.InferenceSession.create("model.onnx")]);
recognise = async batch => {
  const [model, session] = await loaded, answers = [];
  for (const file of batch) answers.push(await answer(file, model, session));
  return answers;
};
document.querySelector("footer a").remove();
