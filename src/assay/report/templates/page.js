"use strict";
const specs = JSON.parse(document.getElementById("specs").textContent);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

// Greys that read on white and on a dark ground, so that neither a theme nor a printer needs the figures drawn again.
const INK = "#77808a", GRID = "rgba(125,133,144,.28)";

function axis(given) {
  const title = given && given.title;
  return { gridcolor: GRID, zerolinecolor: GRID, linecolor: GRID, automargin: true, ...given,
    title: typeof title === "string" ? { text: title } : title };
}

function shown(spec, name) {
  const choices = Object.keys(spec.choices);
  if (!choices.length) return spec.traces.map(() => true);
  const wanted = new Set(spec.choices[name || choices[0]]);
  return spec.traces.map((_, i) => wanted.has(i));
}

function draw(key) {
  const spec = specs[key], place = document.querySelector(`#${key} .plot`);
  const axes = Object.fromEntries(Object.entries(spec.layout).filter(([k]) => /^[xy]axis/.test(k)).map(([k, v]) => [k, axis(v)]));
  const layout = { margin: { l: 60, r: 20, t: 24, b: 48 }, height: 340, font: { color: INK, size: 12 },
    hovermode: "closest", legend: { orientation: "h", y: 1.12 }, xaxis: axis(), yaxis: axis(), ...spec.layout, ...axes,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
  const traces = spec.traces.map((t, i) => ({ ...t, visible: shown(spec)[i] }));
  Plotly.newPlot(place, traces, layout, { responsive: true, displaylogo: false, displayModeBar: "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
}

function choose(key, name) {
  Plotly.restyle(document.querySelector(`#${key} .plot`), { visible: shown(specs[key], name) })
    .then(() => Plotly.relayout(document.querySelector(`#${key} .plot`), { "xaxis.autorange": true, "yaxis.autorange": true }));
}

if (window.Plotly) Object.keys(specs).forEach(draw);
document.querySelectorAll("select[data-for]").forEach(s => s.addEventListener("change", () => choose(s.dataset.for, s.value)));
addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(p => window.Plotly && Plotly.Plots.resize(p)));

document.querySelectorAll("button.data").forEach(button => button.addEventListener("click", () => {
  const part = document.getElementById(button.getAttribute("aria-controls"));
  part.hidden = !part.hidden;
  button.setAttribute("aria-expanded", String(!part.hidden));
}));

document.querySelectorAll("button.save").forEach(button => button.addEventListener("click", () => {
  const table = button.closest("div").querySelector("table");
  const text = [...table.rows].map(r => [...r.cells].map(c => {
    const v = c.dataset.v ?? c.textContent.trim();
    return /[",\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v;
  }).join(",")).join("\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text + "\n"], { type: "text/csv" }));
  link.download = button.dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}));

document.querySelectorAll("button.copy").forEach(button => button.addEventListener("click", async () => {
  const code = button.parentElement.querySelector("code");
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}));

document.querySelectorAll("table.sortable th button").forEach(button => button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", column = head.cellIndex;
  head.parentElement.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => { const c = row.cells[column]; return c.dataset.v === undefined ? null : Number(c.dataset.v); };
  [...body.rows].sort((a, b) => {
    const x = value(a), y = value(b);
    const order = x !== null && y !== null ? x - y
      : (x !== null) - (y !== null) || a.cells[column].textContent.localeCompare(b.cells[column].textContent);
    return up ? order : -order;
  }).forEach(row => body.append(row));
}));

const grid = document.querySelector("table.heads");
if (grid) {
  const said = document.getElementById("head-said"), rest = said.textContent;
  const rows = [...grid.tBodies[0].rows].map(r => [...r.cells].slice(1));
  const tell = cell => { said.textContent = cell.getAttribute("aria-label"); };
  const pick = layer => {
    const select = document.querySelector('select[data-for="spectrum-of-layer"]');
    if (!select) return;
    select.value = `layer ${layer}`;
    select.dispatchEvent(new Event("change"));
    document.getElementById("spectrum-of-layer").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "center" });
  };
  grid.addEventListener("mouseover", e => { if (e.target.matches("td")) tell(e.target); });
  grid.addEventListener("mouseleave", () => { said.textContent = rest; });
  grid.addEventListener("focusin", e => { if (e.target.matches("td")) tell(e.target); });
  grid.addEventListener("click", e => { if (e.target.matches("td")) pick(e.target.dataset.layer); });
  grid.addEventListener("keydown", e => {
    const i = rows.findIndex(r => r.includes(e.target));
    if (i < 0) return;
    const j = rows[i].indexOf(e.target);
    if (e.key === "Enter") { pick(e.target.dataset.layer); e.preventDefault(); return; }
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key];
    const next = step && rows[i + step[0]]?.[j + step[1]];
    if (!next) return;
    e.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    e.preventDefault();
  });
}
