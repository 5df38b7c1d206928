"use strict";
// The switch: what the system says, unless someone has chosen.
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
// Charts: the mouse, or arrow keys, read values off the curves.
for (const svg of document.querySelectorAll("figure.chart svg")) {
  const curves = JSON.parse(svg.dataset.curves), cursor = svg.querySelector(".cursor");
  const readout = svg.parentElement.querySelector(".readout");
  const steps = [...new Set(curves.flatMap(c => c.points.map(p => p[0])))].sort((a, b) => a - b);
  const places = new Map(curves.flatMap(c => c.points.map(p => [p[0], p[2]])));
  let at = steps.length - 1;
  const show = number => {
    at = Math.max(0, Math.min(steps.length - 1, number));
    const step = steps[at];
    cursor.setAttribute("d", `M${places.get(step)},${svg.dataset.top}V${svg.dataset.bottom}`);
    const said = curves.map(c => [c.name, c.points.find(p => p[0] === step)]).filter(pair => pair[1]);
    readout.textContent = `step ${step}: ` + said.map(([name, p]) => `${name} ${p[1]}`).join(", ");
  };
  const hide = () => { cursor.setAttribute("d", ""); readout.textContent = "\u00a0"; };
  svg.addEventListener("mousemove", event => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    let best = 0;
    steps.forEach((step, number) => { if (Math.abs(places.get(step) - x) < Math.abs(places.get(steps[best]) - x)) best = number; });
    show(best);
  });
  svg.addEventListener("mouseleave", () => { if (document.activeElement !== svg) hide(); });
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const wide = Math.max(1, Math.round(steps.length / 20));
    const go = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - wide, PageDown: at + wide, Home: 0, End: steps.length - 1 }[event.key];
    if (go !== undefined) { show(go); event.preventDefault(); }
  });
}
// The time line: its width is the zoom.
for (const box of document.querySelectorAll(".lanes")) {
  const canvas = box.querySelector(".canvas");
  let zoom = 1;
  const set = factor => {
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    zoom = Math.max(1, Math.min(40, zoom * factor));
    canvas.style.width = `${100 * zoom}%`;
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
  };
  box.parentElement.previousElementSibling.addEventListener("click", event => {
    const way = event.target.dataset.zoom;
    if (way) set(way === "in" ? 1.6 : 1 / 1.6);
  });
  box.addEventListener("keydown", event => {
    if (event.key === "+" || event.key === "=") set(1.6);
    if (event.key === "-") set(1 / 1.6);
    if (event.key === "ArrowRight") box.scrollLeft += 60;
    if (event.key === "ArrowLeft") box.scrollLeft -= 60;
  });
}
