"use strict";
// One picture at a time is shown; all that were given stay in `items`. Nothing is stored, nothing leaves but to this server.
const $ = id => document.getElementById(id);
const items = [];
let current = null, model = null, patch = null, token = "", turn = 0, trouble = "";

const RAMP = [[0, 72, 24, 120], [0.4, 190, 40, 110], [0.7, 250, 120, 50], [1, 255, 240, 130]];

function colour(level) {
  const above = RAMP.findIndex(stop => stop[0] >= level), to = RAMP[Math.max(1, above)], from = RAMP[Math.max(1, above) - 1];
  const part = (level - from[0]) / (to[0] - from[0]);
  return [1, 2, 3].map(i => from[i] + part * (to[i] - from[i]));
}

async function ask(path, file) {
  const options = {headers: token ? {Authorization: "Bearer " + token} : {}};
  if (file) {
    options.method = "POST";
    options.body = file;
    options.headers["Content-Type"] = "application/octet-stream";
  }
  let response;
  try { response = await fetch(path, options); } catch { throw new Error("The server does not answer. Is it still running?"); }
  const said = await response.json().catch(() => ({}));
  if (response.status === 401) {
    $("key").hidden = false;
    throw new Error(token ? "This is not the server's token." : "This server asks for a token: type it below.");
  }
  if (!response.ok) throw new Error(said.detail || "The server answered " + response.status + ".");
  return said;
}

function tell(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

async function begin() {
  try { model = await ask("v1/model"); } catch (error) { trouble = error.message; tell(trouble, true); return; }
  $("key").hidden = true;
  const size = model.config.image_size.join(" x ");
  const kind = `${model.architecture}, ${model.labels.length} classes, ${size} pixels`;
  $("about").textContent = model.name ? `${model.name}: ${kind}` : kind;
  fill($("method"), model.methods.map(name => [name, name]));
  document.querySelector("input[value=attention]").parentNode.hidden = !model.layers;
  document.querySelector("input[value=why]").parentNode.hidden = !model.methods.length;
  if (!model.methods.length) choose("none");
  if (model.layers) {
    fill($("layer"), [...Array(model.layers).keys()].map(i => [i, i + 1]), model.layers - 1);
    fill($("head"), [["", "mean of all"], ...[...Array(model.heads).keys()].map(i => [i, i + 1])]);
  }
  facts();
  if (!current) tell("No picture yet.");
}

function fill(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

const few = numbers => numbers.map(n => Number(n.toPrecision(4))).join(", ");

function facts() {
  const rows = {
    parameters: model.parameters.toLocaleString("en"),
    "came from": model.family,
    prepared: `${model.preprocess.resize}, crop ${model.preprocess.crop}, mean ${few(model.preprocess.mean)}, std ${few(model.preprocess.std)}`,
    temperature: String(Math.round(model.temperature * 1000) / 1000),
    classes: model.labels.slice(0, 12).join(" · ") + (model.labels.length > 12 ? ` · and ${model.labels.length - 12} more` : ""),
  };
  for (const [part, figures] of Object.entries(model.provenance?.metrics || {}))
    if (figures?.top1 !== undefined) rows[`accuracy, ${part}`] = `${percent(figures.top1)} of ${figures.n} pictures`;
  for (const [key, value] of Object.entries(model.provenance || {}))
    if (typeof value !== "object" && key !== "step") rows[key] = String(value);
  $("facts").replaceChildren(...Object.entries(rows).flatMap(([key, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = key; text.textContent = value;
    return [term, text];
  }));
}

function add(files) {
  const pictures = [...files];
  if (!pictures.length) return;
  let first = null;
  for (const file of pictures) {
    const item = {file, name: file.name || "pasted picture", url: URL.createObjectURL(file), maps: new Map()};
    items.push(item);
    first = first || item;
    thumbnail(item);
  }
  $("history").hidden = items.length < 2;
  show(first);
}

function thumbnail(item) {
  const button = document.createElement("button"), image = document.createElement("img");
  image.src = item.url; image.alt = item.name;
  button.type = "button"; button.setAttribute("role", "option"); button.title = item.name;
  button.append(image);
  button.onclick = () => show(item);
  item.button = button;
  $("history").append(button);
}

async function show(item) {
  current = item; patch = null; $("spot").hidden = true;
  const mine = ++turn;
  for (const each of items) each.button.setAttribute("aria-selected", String(each === item));
  $("scores").replaceChildren();
  $("controls").hidden = true;
  tell("Looking at " + item.name + " …");
  try {
    await started;
    if (!model) throw new Error(trouble);
    item.result = item.result || (await ask("v1/predict?top=5", item.file)).results[0];
    item.image = item.image || await picture(item);
  } catch (error) {
    item.button.classList.add("wrong"); item.button.title = `${item.name}: ${error.message}`;
    if (mine === turn) { tell(`${item.name}: ${error.message}`, true); $("canvas").hidden = true; $("drop").classList.remove("full"); }
    return;
  }
  if (mine !== turn) return;
  item.chosen = item.chosen ?? item.result.predictions[0].index;
  const best = item.result.predictions[0];
  item.button.classList.remove("wrong"); item.button.title = `${item.name}: ${best.label}`;
  const unseen = item.image ? "" : ". This browser cannot show such a file, so the map lies on grey";
  tell(`${item.name}: ${percent(best.probability)} ${best.label}${unseen}`);
  scores();
  $("controls").hidden = false;
  $("canvas").hidden = false;
  $("drop").classList.add("full");
  refresh();
}

async function picture(item) {
  // The browser may not know a format that the server reads; then the map is shown on grey.
  try { return await createImageBitmap(item.file, {imageOrientation: "from-image"}); } catch { return null; }
}

const percent = share => (100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 2 : 1) + " %";

function scores() {
  $("scores").replaceChildren(...current.result.predictions.map(each => {
    const line = document.createElement("li"), button = document.createElement("button");
    const bar = document.createElement("i"), label = document.createElement("span"), share = document.createElement("b");
    bar.style.width = 100 * each.probability + "%";
    label.textContent = each.label; share.textContent = percent(each.probability);
    button.type = "button"; button.append(bar, label, share);
    button.setAttribute("aria-pressed", String(each.index === current.chosen));
    button.title = "Why this one?";
    button.onclick = () => { current.chosen = each.index; scores(); if (model.methods.length) choose("why"); };
    line.append(button);
    return line;
  }));
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

function choose(value) {
  document.querySelector(`input[name=mode][value=${value}]`).checked = true;
  refresh();
}

async function refresh() {
  const item = current, what = mode();
  $("why-row").hidden = what !== "why";
  $("attention-row").hidden = $("hint").hidden = what !== "attention";
  const alike = what === "why" && ["rollout", "attention"].includes($("method").value);
  $("alike").hidden = !alike;
  if (!item || !item.result) return;
  if (what === "none") { draw(); return; }
  const path = what === "why"
    ? `v1/explain?index=${item.chosen}&method=${$("method").value}`
    : `v1/attention?layer=${$("layer").value}` + ($("head").value === "" ? "" : `&head=${$("head").value}`);
  item.wanted = path;
  draw();
  if (!item.maps.has(path)) {
    try {
      const found = (await ask(path, item.file)).results[0];
      item.maps.set(path, found.explanation || unpacked(found.attention));
    } catch (error) {
      if (item === current && item.wanted === path) tell(error.message, true);
      return;
    }
  }
  if (item === current && item.wanted === path) draw();
}

function unpacked(attention) {
  const bytes = Uint8Array.from(atob(attention.values), c => c.charCodeAt(0));
  return {...attention, bytes, tokens: attention.rows * attention.columns + attention.prefix};
}

function heat(item) {
  // Rows of numbers from 0 to 1, and the part of the picture that they cover; null while they are on their way.
  const found = item.maps.get(item.wanted);
  if (!found || mode() === "none") return null;
  if (found.map) return found;
  const {rows, columns, prefix, tokens, bytes, box} = found, row = new Float32Array(rows * columns);
  const reader = patch ? prefix + patch[0] * columns + patch[1] : tokens;  // the last row: where the answer is read from
  for (let i = 0; i < row.length; i++) row[i] = bytes[reader * tokens + prefix + i] / 255;
  return {box, map: [...Array(rows).keys()].map(r => Array.from(row.slice(r * columns, (r + 1) * columns)))};
}

function draw() {
  if (!current || !current.result) return;
  const canvas = $("canvas"), item = current, image = item.image;
  const width = image ? image.width : 448, height = image ? image.height : 448;
  const longest = Math.max(width, height), tiny = longest <= 160;  // tiny ones grow by whole squares, others smoothly
  const fit = tiny ? Math.floor(960 / longest) : Math.min(1400 / longest, Math.max(1, 960 / longest));
  canvas.width = Math.max(1, Math.round(width * fit)); canvas.height = Math.max(1, Math.round(height * fit));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = !tiny; context.imageSmoothingQuality = "high";
  if (image) context.drawImage(image, 0, 0, canvas.width, canvas.height);
  else { context.fillStyle = "#777"; context.fillRect(0, 0, canvas.width, canvas.height); }
  const found = heat(item);
  if (found) lay(context, canvas, found);
  if ($("grid").checked || (patch && mode() === "attention")) lines(context, canvas, found || item.maps.values().next().value);
  canvas.setAttribute("aria-label", describe(found));
}

function describe(found) {
  const best = current.result.predictions[0];
  const about = `${current.name}, taken for ${best.label}`;
  if (!found) return about;
  let place = [0, 0];
  found.map.forEach((row, r) => row.forEach((v, c) => { if (v > found.map[place[0]][place[1]]) place = [r, c]; }));
  return `${about}; the map is hottest at row ${place[0] + 1} of ${found.map.length}, column ${place[1] + 1} of ${found.map[0].length}`;
}

function lay(context, canvas, found) {
  const rows = found.map.length, columns = found.map[0].length;
  const small = new OffscreenCanvas(columns, rows), pixels = new ImageData(columns, rows), blend = $("blend").value / 100;
  found.map.flat().forEach((level, i) => {
    const rgb = colour(level);
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = rgb[c];
    pixels.data[4 * i + 3] = 255 * blend * Math.sqrt(level);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const [left, top, right, bottom] = found.box.map((v, i) => v * (i % 2 ? canvas.height : canvas.width));
  context.fillStyle = `rgb(0 0 0 / ${0.65 * blend})`;  // what the model did not see
  context.fillRect(0, 0, canvas.width, top); context.fillRect(0, bottom, canvas.width, canvas.height - bottom);
  context.fillRect(0, top, left, bottom - top); context.fillRect(right, top, canvas.width - right, bottom - top);
  context.imageSmoothingEnabled = !$("grid").checked; context.imageSmoothingQuality = "high";
  context.drawImage(small, left, top, right - left, bottom - top);
}

function frame(canvas, found) {
  const box = found ? found.box : [0, 0, 1, 1], grid = model.grid || [found.map.length, found.map[0].length];
  const [left, top, right, bottom] = box.map((v, i) => v * (i % 2 ? canvas.height : canvas.width));
  return {left, top, right, bottom, rows: grid[0], columns: grid[1]};
}

function lines(context, canvas, found) {
  if (!found) return;
  const {left, top, right, bottom, rows, columns} = frame(canvas, found);
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

function point(row, column) {
  const grid = model.grid;
  patch = row === null ? null : [Math.min(Math.max(row, 0), grid[0] - 1), Math.min(Math.max(column, 0), grid[1] - 1)];
  $("spot").hidden = !patch;
  if (patch) $("spot").textContent = `patch row ${patch[0] + 1}, column ${patch[1] + 1} looks at`;
  draw();
}

$("canvas").addEventListener("pointermove", event => {
  if (mode() !== "attention" || !current) return;
  const found = heat(current);
  if (!found) return;
  const canvas = $("canvas"), shown = canvas.getBoundingClientRect(), {left, top, right, bottom, rows, columns} = frame(canvas, found);
  const x = (event.clientX - shown.left) * canvas.width / shown.width, y = (event.clientY - shown.top) * canvas.height / shown.height;
  const row = Math.floor((y - top) / (bottom - top) * rows), column = Math.floor((x - left) / (right - left) * columns);
  const inside = row >= 0 && row < rows && column >= 0 && column < columns;
  if (!inside) { if (patch) point(null); return; }
  if (!patch || patch[0] !== row || patch[1] !== column) point(row, column);
});
$("canvas").addEventListener("pointerleave", () => { if (patch) point(null); });
$("canvas").addEventListener("keydown", event => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (event.key === "Escape" && patch) point(null);
  if (!step || mode() !== "attention" || !current) return;
  event.preventDefault();
  const [row, column] = patch || [Math.floor(model.grid[0] / 2), Math.floor(model.grid[1] / 2)];
  point(row + (patch ? step[0] : 0), column + (patch ? step[1] : 0));
});

for (const id of ["files", "camera"]) $(id).addEventListener("change", event => { add(event.target.files); event.target.value = ""; });
for (const id of ["method", "layer", "head"]) $(id).addEventListener("change", refresh);
for (const id of ["blend", "grid"]) $(id).addEventListener("input", () => current && draw());
for (const each of document.querySelectorAll("input[name=mode]")) each.addEventListener("change", () => { patch = null; $("spot").hidden = true; refresh(); });
$("key").addEventListener("submit", event => { event.preventDefault(); token = $("token").value; started = begin(); if (current) show(current); });

const drop = $("drop");
addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
addEventListener("drop", event => { event.preventDefault(); drop.classList.remove("over"); add(event.dataTransfer.files); });
addEventListener("paste", event => add([...event.clipboardData.files]));
let started = begin();
