// Draws the recorded figures in the colours of the page, and again when the reader changes the scheme.
"use strict";

(() => {
  const figures = document.querySelectorAll(".assay-figure");
  if (!figures.length) return;

  const colour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  // The traces of a verdict are dark on white; on a dark ground the same hues are lighter.
  const onDark = { "#1f5fbf": "#6ea8ff", "#7a8699": "#aeb8c8" };

  function recoloured(value, dark) {
    if (typeof value === "string") return (dark && onDark[value.toLowerCase()]) || value;
    if (Array.isArray(value)) return value.map((v) => recoloured(v, dark));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, recoloured(v, dark)]));
    return value;
  }

  function themed(layout) {
    const ink = colour("--md-default-fg-color");
    const grid = colour("--md-default-fg-color--lightest");
    const axis = {
      gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true,
      tickfont: { size: 11 }, title: { standoff: 4 },
    };
    const out = {
      ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, dragmode: false,
      font: { color: ink, family: "system-ui, sans-serif", size: 12 },
      // At the top, where no tick label can run into it.
      legend: { orientation: "h", yref: "container", y: 1, yanchor: "top", x: 0 },
      margin: { t: 80, l: 40, r: 10, b: 40 },
    };
    for (const key of Object.keys(out))
      if (/^[xy]axis\d*$/.test(key)) {
        const own = out[key] || {};
        out[key] = { ...axis, ...own, title: { ...axis.title, ...(own.title || {}) } };
      }
    return out;
  }

  function draw(box) {
    const figure = JSON.parse(box.querySelector("script").textContent);
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    let target = box.querySelector(".plot");
    if (!target) {
      target = document.createElement("div");
      target.className = "plot";
      box.append(target);
    }
    const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
    Plotly.react(target, recoloured(figure.data, dark), themed(recoloured(figure.layout, dark)), options);
  }

  const script = document.createElement("script");
  script.src = figures[0].dataset.plotly;
  script.onload = () => {
    figures.forEach(draw);
    new MutationObserver(() => figures.forEach(draw)).observe(document.body, {
      attributes: true,
      attributeFilter: ["data-md-color-scheme"],
    });
  };
  document.head.append(script);
})();
