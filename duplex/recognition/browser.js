"use strict";
// Replaces the server of page.html: decodes images, prepares them exactly as Pillow does (`Image.resize`, fixed-point
// weights of 22 bits), and runs model.onnx by onnxruntime-web.
const BITS = 2 ** 22;
const ASPECT = 50;  // longer images are cut first, unless they are distorted
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

// Width and height of a scaled image: whole and distorted (squash), whole (longest), or covering the square (shortest).
function scaled(width, height, size, mode) {
  if (mode === "squash") return [size, size];
  if (mode === "longest") {
    const ratio = Math.max(height / size, width / size);
    return [nearestEven(width / ratio), nearestEven(height / ratio)];
  }
  const short = Math.min(width, height);
  return [Math.trunc(size * width / short), Math.trunc(size * height / short)];
}

// A pass of Pillow's: each line of `plane` (`lines` of them, `step` apart, their places `next` apart) becomes one of
// `sums.length` places, written as `to` says.
function pass(plane, lines, step, next, sums, to) {
  const scaledPlane = new Uint8ClampedArray(lines * sums.length);
  for (let line = 0; line < lines; line++) sums.forEach(([start, share], place) => {
    let sum = BITS / 2;
    for (let k = 0; k < share.length; k++) sum += share[k] * plane[line * step + (start + k) * next];
    scaledPlane[to(line, place)] = Math.floor(sum / BITS);
  });
  return scaledPlane;
}

// Pixels [3, size, size] of RGBA `data`, prepared as `model` says: the whole image is distorted (resize_mode squash) or
// gets borders of the colour `fill` (longest), or its middle is cut out (shortest).
function prepare(data, width, height, { size, interpolation, resize_mode: mode, fill, vertical_first }) {
  const keep = mode === "squash" ? Infinity : ASPECT * Math.min(width, height);
  const cutX = Math.floor(Math.max(0, width - keep) / 2), cutY = Math.floor(Math.max(0, height - keep) / 2);
  const w = width - 2 * cutX, h = height - 2 * cutY;
  const [wide, high] = scaled(w, h, size, mode);
  const first = long => Math.max(0, nearestEven((long - size) / 2)), border = long => Math.max(0, Math.floor((size - long) / 2));
  const across = Math.min(size, wide), down = Math.min(size, high);
  const columns = weights(w, wide, first(wide), across, interpolation), rows = weights(h, high, first(high), down, interpolation);
  const downFirst = vertical_first && h > high && h - high > 2 * (w - wide);  // Pillow's rule since 13.0
  const pixels = new Uint8Array(3 * size * size).map((_, place) => fill[Math.trunc(place / size ** 2)]);
  for (let c = 0; c < 3; c++) {
    let plane = new Uint8Array(w * h);
    for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) plane[y * w + x] = data[4 * ((y + cutY) * width + x + cutX) + c];
    if (downFirst) plane = pass(plane, w, 1, w, rows, (x, y) => y * w + x);
    plane = pass(plane, downFirst ? down : h, w, 1, columns, (y, x) => y * across + x);
    if (!downFirst) plane = pass(plane, across, 1, across, rows, (x, y) => y * across + x);
    for (let y = 0; y < down; y++) for (let x = 0; x < across; x++)
      pixels[(c * size + y + border(high)) * size + x + border(wide)] = plane[y * across + x];
  }
  return pixels;
}

async function pixelsOf(file, model) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return prepare(data, canvas.width, canvas.height, model);
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
