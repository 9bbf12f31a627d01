"use strict";
// Shows one image at a time; all images of this session are in `items`. Nothing is stored, and nothing is sent to another server.
const $ = id => document.getElementById(id);
const items = [];
let current = null, model = null, patch = null, token = "", generation = 0, startError = "";

const COLORMAP = [[0, 72, 24, 120], [0.4, 190, 40, 110], [0.7, 250, 120, 50], [1, 255, 240, 130]];

function color(level) {
  const above = COLORMAP.findIndex(stop => stop[0] >= level), to = COLORMAP[Math.max(1, above)], from = COLORMAP[Math.max(1, above) - 1];
  const fraction = (level - from[0]) / (to[0] - from[0]);
  return [1, 2, 3].map(i => from[i] + fraction * (to[i] - from[i]));
}

async function request(path, file) {
  const options = {headers: token ? {Authorization: "Bearer " + token} : {}};
  if (file) {
    options.method = "POST";
    options.body = file;
    options.headers["Content-Type"] = "application/octet-stream";
  }
  let response;
  try { response = await fetch(path, options); } catch { throw new Error("The server does not respond. Is it still running?"); }
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) {
    $("key").hidden = false;
    throw new Error(token ? "The token is wrong." : "This server requires a token: enter it below.");
  }
  if (!response.ok) throw new Error(body.detail || "The server returned status " + response.status + ".");
  return body;
}

function showStatus(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

async function loadModel() {
  try { model = await request("v1/model"); } catch (error) { startError = error.message; showStatus(startError, true); return; }
  $("key").hidden = true;
  const size = model.config.image_size.join(" x ");
  const kind = `${model.architecture}, ${model.labels.length} classes, ${size} pixels`;
  $("about").textContent = model.name ? `${model.name}: ${kind}` : kind;
  setOptions($("method"), model.methods.map(name => [name, name]));
  document.querySelector("input[value=attention]").parentNode.hidden = !model.layers;
  document.querySelector("input[value=explain]").parentNode.hidden = !model.methods.length;
  if (!model.methods.length) setMode("none");
  if (model.layers) {
    setOptions($("layer"), [...Array(model.layers).keys()].map(i => [i, i + 1]), model.layers - 1);
    setOptions($("head"), [["", "mean of all"], ...[...Array(model.heads).keys()].map(i => [i, i + 1])]);
  }
  showFacts();
  if (!current) showStatus("No image yet.");
}

function setOptions(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

const formatNumbers = numbers => numbers.map(n => Number(n.toPrecision(4))).join(", ");

function showFacts() {
  const rows = {
    parameters: model.parameters.toLocaleString("en"),
    format: model.family,
    preprocessing: `${model.preprocess.resize}, crop ${model.preprocess.crop}${model.preprocess.trim ? `, without the last ${model.preprocess.trim.join(" rows and ")} columns` : ""}, mean ${formatNumbers(model.preprocess.mean)}, std ${formatNumbers(model.preprocess.std)}`,
    temperature: String(Math.round(model.temperature * 1000) / 1000),
    classes: model.labels.slice(0, 12).join(" · ") + (model.labels.length > 12 ? ` · and ${model.labels.length - 12} more` : ""),
  };
  for (const [split, metrics] of Object.entries(model.provenance?.metrics || {}))
    if (metrics?.top1 !== undefined) rows[`${split} accuracy`] = `${percent(metrics.top1)} of ${metrics.n} images`;
  for (const [key, value] of Object.entries(model.provenance || {}))
    if (typeof value !== "object" && key !== "step") rows[key] = String(value);
  $("facts").replaceChildren(...Object.entries(rows).flatMap(([key, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = key; text.textContent = value;
    return [term, text];
  }));
}

function addFiles(files) {
  const images = [...files];
  if (!images.length) return;
  let first = null;
  for (const file of images) {
    const item = {file, name: file.name || "pasted image", url: URL.createObjectURL(file), maps: new Map()};
    items.push(item);
    first = first || item;
    addThumbnail(item);
  }
  $("history").hidden = items.length < 2;
  showItem(first);
}

function addThumbnail(item) {
  const button = document.createElement("button"), image = document.createElement("img");
  image.src = item.url; image.alt = item.name;
  button.type = "button"; button.setAttribute("role", "option"); button.title = item.name;
  button.append(image);
  button.onclick = () => showItem(item);
  item.button = button;
  $("history").append(button);
}

async function showItem(item) {
  current = item; patch = null; $("spot").hidden = true;
  const own = ++generation;
  for (const each of items) each.button.setAttribute("aria-selected", String(each === item));
  $("scores").replaceChildren();
  $("controls").hidden = true;
  showStatus("Classifying " + item.name + " …");
  try {
    await started;
    if (!model) throw new Error(startError);
    item.result = item.result || (await request("v1/predict?top=5", item.file)).results[0];
    item.image = item.image || await decodeImage(item);
  } catch (error) {
    item.button.classList.add("error"); item.button.title = `${item.name}: ${error.message}`;
    if (own === generation) { showStatus(`${item.name}: ${error.message}`, true); $("canvas").hidden = true; $("drop").classList.remove("full"); }
    return;
  }
  if (own !== generation) return;
  item.chosen = item.chosen ?? item.result.predictions[0].index;
  const best = item.result.predictions[0];
  item.button.classList.remove("error"); item.button.title = `${item.name}: ${best.label}`;
  const undecodable = item.image ? "" : ". This browser cannot show the file, so the map is drawn on gray";
  showStatus(`${item.name}: ${percent(best.probability)} ${best.label}${undecodable}`);
  showScores();
  $("controls").hidden = false;
  $("canvas").hidden = false;
  $("drop").classList.add("full");
  updateView();
}

async function decodeImage(item) {
  // The server reads formats that a browser may not know; the map is then drawn on gray.
  try { return await createImageBitmap(item.file, {imageOrientation: "from-image"}); } catch { return null; }
}

const percent = fraction => (100 * fraction).toFixed(fraction > 0.9995 || fraction < 0.0995 ? 2 : 1) + " %";

function showScores() {
  $("scores").replaceChildren(...current.result.predictions.map(score => {
    const line = document.createElement("li"), button = document.createElement("button");
    const bar = document.createElement("i"), label = document.createElement("span"), probability = document.createElement("b");
    bar.style.width = 100 * score.probability + "%";
    label.textContent = score.label; probability.textContent = percent(score.probability);
    button.type = "button"; button.append(bar, label, probability);
    button.setAttribute("aria-pressed", String(score.index === current.chosen));
    button.title = "Explain this class";
    button.onclick = () => { current.chosen = score.index; showScores(); if (model.methods.length) setMode("explain"); };
    line.append(button);
    return line;
  }));
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

function setMode(value) {
  document.querySelector(`input[name=mode][value=${value}]`).checked = true;
  updateView();
}

async function updateView() {
  const item = current, view = mode();
  $("explain-row").hidden = view !== "explain";
  $("attention-row").hidden = $("attention-hint").hidden = view !== "attention";
  const classAgnostic = view === "explain" && ["rollout", "attention"].includes($("method").value);
  $("class-agnostic").hidden = !classAgnostic;
  if (!item || !item.result) return;
  if (view === "none") { draw(); return; }
  const path = view === "explain"
    ? `v1/explain?index=${item.chosen}&method=${$("method").value}`
    : `v1/attention?layer=${$("layer").value}` + ($("head").value === "" ? "" : `&head=${$("head").value}`);
  item.wanted = path;
  draw();
  if (!item.maps.has(path)) {
    try {
      const result = (await request(path, item.file)).results[0];
      item.maps.set(path, result.explanation || decodeAttention(result.attention));
    } catch (error) {
      if (item === current && item.wanted === path) showStatus(error.message, true);
      return;
    }
  }
  if (item === current && item.wanted === path) draw();
}

function decodeAttention(attention) {
  const bytes = Uint8Array.from(atob(attention.values), c => c.charCodeAt(0));
  return {...attention, bytes, tokens: attention.rows * attention.columns + attention.prefix};
}

function currentMap(item) {
  // Returns rows of numbers from 0 to 1 and the box of the image that they cover; null while they are loading.
  const map = item.maps.get(item.wanted);
  if (!map || mode() === "none") return null;
  if (map.map) return map;
  const {rows, columns, prefix, tokens, bytes, box} = map, row = new Float32Array(rows * columns);
  const reader = patch ? prefix + patch[0] * columns + patch[1] : tokens;  // the last row is the pooled output's
  for (let i = 0; i < row.length; i++) row[i] = bytes[reader * tokens + prefix + i] / 255;
  return {box, map: [...Array(rows).keys()].map(r => Array.from(row.slice(r * columns, (r + 1) * columns)))};
}

function draw() {
  if (!current || !current.result) return;
  const canvas = $("canvas"), item = current, image = item.image;
  const width = image ? image.width : 448, height = image ? image.height : 448;
  const longest = Math.max(width, height), tiny = longest <= 160;  // tiny images are enlarged by whole pixels, others smoothly
  const fit = tiny ? Math.floor(960 / longest) : Math.min(1400 / longest, Math.max(1, 960 / longest));
  canvas.width = Math.max(1, Math.round(width * fit)); canvas.height = Math.max(1, Math.round(height * fit));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = !tiny; context.imageSmoothingQuality = "high";
  if (image) context.drawImage(image, 0, 0, canvas.width, canvas.height);
  else { context.fillStyle = "#777"; context.fillRect(0, 0, canvas.width, canvas.height); }
  const map = currentMap(item);
  if (map) drawMap(context, canvas, map);
  if ($("grid").checked || (patch && mode() === "attention")) drawGrid(context, canvas, map || item.maps.values().next().value);
  canvas.setAttribute("aria-label", describe(map));
}

function describe(map) {
  const best = current.result.predictions[0];
  const prediction = `${current.name}, predicted as ${best.label}`;
  if (!map) return prediction;
  let place = [0, 0];
  map.map.forEach((row, r) => row.forEach((v, c) => { if (v > map.map[place[0]][place[1]]) place = [r, c]; }));
  return `${prediction}; the map is brightest at row ${place[0] + 1} of ${map.map.length}, column ${place[1] + 1} of ${map.map[0].length}`;
}

function drawMap(context, canvas, map) {
  const rows = map.map.length, columns = map.map[0].length;
  const small = new OffscreenCanvas(columns, rows), pixels = new ImageData(columns, rows), blend = $("blend").value / 100;
  map.map.flat().forEach((level, i) => {
    const rgb = color(level);
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = rgb[c];
    pixels.data[4 * i + 3] = 255 * blend * Math.sqrt(level);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const [left, top, right, bottom] = map.box.map((v, i) => v * (i % 2 ? canvas.height : canvas.width));
  context.fillStyle = `rgb(0 0 0 / ${0.65 * blend})`;  // cropped away
  context.fillRect(0, 0, canvas.width, top); context.fillRect(0, bottom, canvas.width, canvas.height - bottom);
  context.fillRect(0, top, left, bottom - top); context.fillRect(right, top, canvas.width - right, bottom - top);
  context.imageSmoothingEnabled = !$("grid").checked; context.imageSmoothingQuality = "high";
  context.drawImage(small, left, top, right - left, bottom - top);
}

function frame(canvas, map) {
  const box = map ? map.box : [0, 0, 1, 1], grid = model.grid || [map.map.length, map.map[0].length];
  const [left, top, right, bottom] = box.map((v, i) => v * (i % 2 ? canvas.height : canvas.width));
  return {left, top, right, bottom, rows: grid[0], columns: grid[1]};
}

function drawGrid(context, canvas, map) {
  if (!map) return;
  const {left, top, right, bottom, rows, columns} = frame(canvas, map);
  if ($("grid").checked) {
    context.strokeStyle = "rgb(255 255 255 / .5)"; context.lineWidth = Math.max(1, canvas.width / 900);
    context.beginPath();
    for (let r = 0; r <= rows; r++) { const y = top + (bottom - top) * r / rows; context.moveTo(left, y); context.lineTo(right, y); }
    for (let c = 0; c <= columns; c++) { const x = left + (right - left) * c / columns; context.moveTo(x, top); context.lineTo(x, bottom); }
    context.stroke();
  }
  if (patch && mode() === "attention") {
    context.strokeStyle = "#fff"; context.lineWidth = Math.max(2, canvas.width / 300);
    context.strokeRect(left + (right - left) * patch[1] / columns, top + (bottom - top) * patch[0] / rows,
      (right - left) / columns, (bottom - top) / rows);
  }
}

function selectPatch(row, column) {
  const grid = model.grid;
  patch = row === null ? null : [Math.min(Math.max(row, 0), grid[0] - 1), Math.min(Math.max(column, 0), grid[1] - 1)];
  $("spot").hidden = !patch;
  if (patch) $("spot").textContent = `patch row ${patch[0] + 1}, column ${patch[1] + 1} attends to`;
  draw();
}

$("canvas").addEventListener("pointermove", event => {
  if (mode() !== "attention" || !current) return;
  const map = currentMap(current);
  if (!map) return;
  const canvas = $("canvas"), shown = canvas.getBoundingClientRect(), {left, top, right, bottom, rows, columns} = frame(canvas, map);
  const x = (event.clientX - shown.left) * canvas.width / shown.width, y = (event.clientY - shown.top) * canvas.height / shown.height;
  const row = Math.floor((y - top) / (bottom - top) * rows), column = Math.floor((x - left) / (right - left) * columns);
  const inside = row >= 0 && row < rows && column >= 0 && column < columns;
  if (!inside) { if (patch) selectPatch(null); return; }
  if (!patch || patch[0] !== row || patch[1] !== column) selectPatch(row, column);
});
$("canvas").addEventListener("pointerleave", () => { if (patch) selectPatch(null); });
$("canvas").addEventListener("keydown", event => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (event.key === "Escape" && patch) selectPatch(null);
  if (!step || mode() !== "attention" || !current) return;
  event.preventDefault();
  const [row, column] = patch || [Math.floor(model.grid[0] / 2), Math.floor(model.grid[1] / 2)];
  selectPatch(row + (patch ? step[0] : 0), column + (patch ? step[1] : 0));
});

for (const id of ["files", "camera"]) $(id).addEventListener("change", event => { addFiles(event.target.files); event.target.value = ""; });
for (const id of ["method", "layer", "head"]) $(id).addEventListener("change", updateView);
for (const id of ["blend", "grid"]) $(id).addEventListener("input", () => current && draw());
for (const each of document.querySelectorAll("input[name=mode]")) each.addEventListener("change", () => { patch = null; $("spot").hidden = true; updateView(); });
$("key").addEventListener("submit", event => { event.preventDefault(); token = $("token").value; started = loadModel(); if (current) showItem(current); });

const drop = $("drop");
addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
addEventListener("drop", event => { event.preventDefault(); drop.classList.remove("over"); addFiles(event.dataTransfer.files); });
addEventListener("paste", event => addFiles([...event.clipboardData.files]));
let started = loadModel();
