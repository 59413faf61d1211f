"use strict";
// Everything that the page says is in its HTML; this only filters, opens and draws.

const held = document.getElementById("drawn");
const drawn = held ? JSON.parse(held.textContent) : {};

function library() {
  // The library is several megabytes: it is read when the first picture is drawn.
  if (!window.Plotly) {
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }
  return window.Plotly;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(title, more) {
  return Object.assign({ title: { text: title, font: { size: 12 } }, gridcolor: colour("--line"), zeroline: false, automargin: true }, more);
}

function chart(box, label, traces, layout) {
  const figure = document.createElement("figure");
  const target = document.createElement("div");
  const caption = document.createElement("figcaption");
  target.className = "chart";
  target.setAttribute("role", "img");
  target.setAttribute("aria-label", label);
  caption.textContent = label;
  figure.append(target, caption);
  box.append(figure);
  const base = {
    margin: { l: 50, r: 10, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), size: 11 }, showlegend: false,
  };
  library().newPlot(target, traces, Object.assign(base, layout), { displayModeBar: false, responsive: true });
}

function power(value) {
  return "1e" + value;
}

const ticks = { tickvals: [-4, -2, 0, 2, 4, 6, 8, 10, 12], ticktext: ["1e-4", "0.01", "1", "100", "1e4", "1e6", "1e8", "1e10", "1e12"] };
const scale = () => [[0, colour("--field")], [1, colour("--bad")]];
const bounded = (x) => Math.max(-4, Math.min(12, Math.log10(Math.max(x, 1e-4))));

function binNames(errors) {
  const names = ["below " + power(errors[0])];
  for (let i = 1; i < errors.length; i += 1) names.push(power(errors[i - 1]));
  names.push("from " + power(errors[errors.length - 1]));
  return names;
}

function pictures(box, list, errors) {
  const middle = errors.map((e) => e + 0.25);
  const at = [errors[0] - 0.25, ...middle];
  const names = binNames(errors);
  for (const one of list) {
    const head = document.createElement("p");
    head.textContent = one.name + ", " + one.said;
    box.append(head);
    chart(box, "How many values have which error. The line marks what rounding explains.",
      [{ type: "bar", x: at, y: one.histogram, width: 0.46, customdata: names, hovertemplate: "%{y} values, error %{customdata}<extra></extra>",
         marker: { color: at.map((e) => colour(e > 0 ? "--bad" : "--bar")) } }],
      { xaxis: axis("error, in multiples of what rounding explains", ticks), yaxis: axis("values"),
        shapes: [{ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: colour("--quiet"), width: 1 } }] });
    const rows = one.magnitude;
    const columns = at.map((_, i) => rows.map((row) => (row[i] ? Math.log10(row[i]) : null)));
    chart(box, "Errors against the size of the expected value, from the largest to smaller ones; darker is more values.",
      [{ type: "heatmap", x: rows.map((_, i) => -i), y: at, z: columns, colorscale: [[0, colour("--line")], [1, colour("--bar")]], showscale: false,
         hovertemplate: "value 2^%{x} of the largest, error 1e%{y}<extra></extra>" }],
      { xaxis: axis("expected value, as a power of two of the largest"), yaxis: axis("error", ticks) });
    const map = one.map.map((row) => row.map(bounded));
    // Four powers of ten below the largest error: where the fault lies, not how large it is.
    const top = Math.max(...map.map((row) => Math.max(...row)));
    chart(box, "The largest error in each part of the array, in multiples of what rounding explains.",
      [{ type: "heatmap", z: map, zmin: top - 4, zmax: top, colorscale: scale(),
         colorbar: { thickness: 10, tickprefix: "1e", tickformat: ".0f" },
         hovertemplate: "1e%{z:.1f} times what rounding explains<extra></extra>" }],
      { xaxis: axis(one.axes[1] || one.axes[0] || ""), yaxis: axis(one.axes.length > 1 ? one.axes[0] : "", { autorange: "reversed" }) });
  }
}

function drawPictures(box) {
  const from = drawn[box.dataset.report];
  box.replaceChildren();
  pictures(box, from.modules[box.dataset.pictures] || [], from.errors);
}

const scaled = (title, more) => axis(title, Object.assign({ type: "log", exponentformat: "e" }, more));

function drawTraining(box) {
  const of = drawn[box.dataset.training].training;
  const steps = of.drift.map((row) => row[0]);
  const line = (column, label, name) => ({ type: "scatter", mode: "lines+markers", x: steps, y: of.drift.map((row) => row[column] || null), name: label,
    hovertemplate: label + " %{y:.1e}, step %{x}<extra></extra>", line: { color: colour(name), width: 1.5 }, marker: { size: 4 } });
  const bound = (y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("--quiet"), width: 1 } });
  const parted = of.first ? [{ type: "line", x0: of.first, x1: of.first, yref: "paper", y0: 0, y1: 1, line: { color: colour("--bad"), width: 1, dash: "dot" } }] : [];
  const counted = axis("step", { tick0: 1, dtick: Math.max(1, Math.ceil(steps.length / 10)) });
  const named = { showlegend: true, legend: { orientation: "h", y: 1.2 }, margin: { l: 60, r: 10, t: 30, b: 40 } };
  box.replaceChildren();
  chart(box, "The largest difference behind each step in float64, as a part of the largest value, that of the loss as it is. The line marks what counts as the same" +
    (of.first ? ", the dotted one the step in which they part." : "."),
    [line(2, "parameters", "--bad"), line(1, "gradients", "--bar"), line(3, "loss", "--warn")],
    { xaxis: counted, yaxis: scaled("difference"), shapes: [bound(of.allowed), ...parted], ...named });
  chart(box, "The loss of the torch model, step by step.",
    [{ type: "scatter", mode: "lines", x: steps, y: of.loss, line: { color: colour("--bar"), width: 1.5 } }], { xaxis: counted, yaxis: axis("loss") });
  if (of.native.length) {
    chart(box, "The error of each step in the dtype of the models, over what is allowed by torch's own. The line marks 1.",
      [{ type: "scatter", mode: "lines+markers", x: of.native.map((row) => row[0]), y: of.native.map((row) => row[1] || null),
         line: { color: colour("--bar"), width: 1.5 }, marker: { size: 4 } }],
      { xaxis: counted, yaxis: scaled("error"), shapes: [bound(1)] });
  }
}

function drawCourse(box) {
  const steps = drawn[box.dataset.course].course;
  box.replaceChildren();
  chart(box, "The error of each module call in the order in which torch finishes them. The line marks what rounding explains.",
    [{ type: "scatter", mode: steps.length > 400 ? "lines" : "lines+markers", x: steps.map((_, i) => i + 1), y: steps.map((s) => bounded(s[1])),
       text: steps.map((s) => s[0]), hovertemplate: "%{text}<extra></extra>", line: { color: colour("--quiet"), width: 1 },
       marker: { size: 6, color: steps.map((s) => colour(s[2] ? "--bar" : "--bad")) } }],
    { xaxis: axis("module calls"), yaxis: axis("error", Object.assign({ range: [-4.2, Math.max(1, ...steps.map((s) => bounded(s[1]))) + 0.3] }, ticks)),
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("--quiet"), width: 1 } }] });
}

// What nobody looks at is not drawn: a model may have a thousand modules.
const draw = (box) => (box.dataset.course ? drawCourse(box) : box.dataset.training ? drawTraining(box) : drawPictures(box));
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !entry.target.childElementCount) draw(entry.target);
  }
}, { rootMargin: "200px" });

function filter(list, text, failed) {
  const items = [...list.querySelectorAll("[data-text]")];
  let shown = 0;
  for (const item of items) {
    const fits = item.dataset.text.includes(text) && (!failed || item.dataset.state !== "passed");
    item.hidden = !fits;
    shown += fits;
  }
  // A module is shown with those that it lies in.
  for (const item of items) {
    if (item.hidden) continue;
    for (let up = item.parentElement.closest("[data-text]"); up && list.contains(up); up = up.parentElement.closest("[data-text]")) {
      up.hidden = false;
      if (text) up.querySelector(":scope > details")?.setAttribute("open", "");
    }
  }
  const count = document.querySelector(`[data-count="${list.id}"]`);
  if (count) count.textContent = text || failed ? `${shown} of ${items.length} shown` : "";
}

function refilter(id) {
  const field = document.querySelector(`[data-filter="${id}"]`);
  const box = document.querySelector(`[data-only-failed="${id}"]`);
  filter(document.getElementById(id), field ? field.value.trim().toLowerCase() : "", box ? box.checked : false);
}

document.addEventListener("input", (event) => {
  const id = event.target.dataset.filter || event.target.dataset.onlyFailed;
  if (id) refilter(id);
});
document.addEventListener("click", (event) => {
  const { open, close } = event.target.dataset;
  const tree = document.getElementById(open || close || "");
  if (tree) tree.querySelectorAll("details").forEach((details) => { details.open = Boolean(open); });
});
const boxes = document.querySelectorAll("[data-pictures], [data-course], [data-training]");
boxes.forEach((box) => watcher.observe(box));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  boxes.forEach((box) => box.childElementCount && draw(box));
});
